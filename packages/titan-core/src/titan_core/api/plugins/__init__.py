"""How do I register something, what do I receive, and how do I say what is wrong?

A plugin is a module that an entry point in the group ``titan.plugins`` names::

    from titan_core.api import Model, Ref, hookimpl

    api = (1, 0)

    @hookimpl
    def titan_models():
        return [Model(name="tiny", summary="...", flavors=FLAVORS, define=Ref("tiny.layout:define"))]

* ``hookimpl``: marks a function of a plugin as a hook
* ``Ref``: ``"package.module:attribute"``, imported when a job needs it
* ``Component``: base class of all kinds: name, summary, config section, slots
* ``Recipe``: a config that ships with the plugin (hook ``titan_recipes``)
* ``recipes_in``: returns a recipe for each TOML file in a folder of the package
* ``Job``: ``context.job``: config, mesh, batch and model, while the job is assembled
* ``JobContext``: what a component's code receives while a job is assembled: section and job
* ``TrainingContext``: what it receives once training starts: section, job, mesh and device
* ``Problem``: a mistake in the config: where, why, fix
* ``UserError``: raise it with one or more problems; printed without a traceback
* ``RunStopped``: raise it in an observer to end the run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.hookspecs import hookimpl as hookimpl
    from titan_core.api.plugins.component import Component as Component, Recipe as Recipe, recipes_in as recipes_in
    from titan_core.api.plugins.errors import Problem as Problem, RunStopped as RunStopped, UserError as UserError
    from titan_core.api.plugins.job import Job as Job, JobContext as JobContext, TrainingContext as TrainingContext
    from titan_core.api.plugins.ref import Ref as Ref
else:
    __getattr__ = getter(__name__, "plugins")
    __all__ = names_of("plugins")
