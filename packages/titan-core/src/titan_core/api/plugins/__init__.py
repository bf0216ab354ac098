"""How do I register something, what do I receive, and how do I say what is wrong?

A plugin is a module that an entry point in the group ``titan.plugins`` names::

    from titan_core.api import Model, Ref, hookimpl

    api = (1, 0)

    @hookimpl
    def titan_models():
        return [Model(name="tiny", summary="...", flavors=FLAVORS, define=Ref("tiny.layout:define"))]

* ``hookimpl``: marks a hook
* ``Ref``: ``"package.module:attribute"``, imported when a job needs it
* ``Component``: what all kinds share: name, summary, config section
* ``Recipe``: a config that ships with the plugin
* ``recipes_in``: all recipes of a folder
* ``Job``: the job as a component sees it: config, mesh, batch, model
* ``JobContext``: section and job: what code receives while a job is assembled
* ``TrainingContext``: adds mesh and device once training starts
* ``Problem``: one mistake: where, why, fix
* ``UserError``: an error with one or several problems
* ``RunStopped``: an observer ends the run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.hookspecs import hookimpl as hookimpl
    from titan_core.api.plugins.component import Component as Component, Recipe as Recipe, recipes_in as recipes_in
    from titan_core.api.plugins.contexts import JobContext as JobContext, TrainingContext as TrainingContext
    from titan_core.api.plugins.errors import Problem as Problem, RunStopped as RunStopped, UserError as UserError
    from titan_core.api.plugins.job import Job as Job
    from titan_core.api.plugins.ref import Ref as Ref
else:
    __getattr__ = getter(__name__, "plugins")
    __all__ = names_of("plugins")
