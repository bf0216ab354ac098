"""The dimensions of a mesh, for code that names them."""

from __future__ import annotations

from titan_core.api.parallel.mesh import dims_in_order as dims_in_order, sound_views as sound_views
