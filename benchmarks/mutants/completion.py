"""Mistakes in shell completion, schema and copies of recipes."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

COMPLETION, COPY = "tests/completion/test_completion.py", "tests/completion/test_recipe_copy.py"
TABLE, RECIPE, SCHEMA = "completion/table.py", "completion/recipe_copy.py", "completion/schema.py"

MUTANTS = (
    Mutant("keys-without-files", TABLE, '"/" if accepts_path(field) else "@"', '"@"', (COMPLETION,)),
    Mutant("no-flag-for-booleans", TABLE, "            if accepts_boolean(field):\n", "            if False:\n", (COMPLETION,)),
    Mutant("recipes-not-completed", TABLE, 'return "/" + " ".join(registry.names(Recipe))', 'return "/"', (COMPLETION,)),
    Mutant("suppressed-options-offered", TABLE, "if action.help == argparse.SUPPRESS:", "if False:", (COMPLETION,)),
    Mutant("launchers-options-missing", TABLE, "        launcher.arguments.load()(parser)\n", "        pass\n", (COMPLETION,)),
    Mutant("options-of-groups-missing", TABLE, "return self._recording(super().add_argument_group(*arguments, **options))", "return super().add_argument_group(*arguments, **options)", (COMPLETION,)),
    Mutant("descriptions-of-any-length", TABLE, "if len(sentence) > _LONGEST_DESCRIPTION:", "if False:", (COMPLETION,)),
    Mutant("arguments-of-models-missing", TABLE, ", *((MODEL_ARGS, cls) for cls in model_families(registry).values())", "", (COMPLETION,)),
    Mutant("copy-keeps-the-folder", RECIPE, "            skipping = path == _DUMP_FOLDER\n", "            skipping = False\n", (COPY,)),
    Mutant("copy-is-not-compared", RECIPE, "        if parse_toml(copy) == tables:\n", "        if True:\n", (COPY,)),
    Mutant("documentation-below-comments", RECIPE, 'while above and written[above - 1].lstrip().startswith("#"):', "while False:", (COPY,)),
    Mutant("keys-within-values-documented", RECIPE, "if not _begins_statement(lines, number):", "if False:", (COPY,)),
    Mutant("flavors-default-ignored", RECIPE, "if of_flavor is not None and len(inner) == 1:", "if False:", (COPY,)),
    Mutant("schema-without-documentation", SCHEMA, 'properties[key]["description"] = text', "pass", (COMPLETION,)),
    Mutant("schema-requires-what-the-flavor-sets", SCHEMA, '_definition(definitions, references[cls, "validation"]).pop("required", None)', "pass", (COMPLETION,)),
    Mutant("schema-of-the-last-owner", SCHEMA, "merged |= _definition", "merged = _definition", (COMPLETION,)),
    Mutant("schema-allows-unknown-keys", SCHEMA, '"properties": merged, "additionalProperties": False', '"properties": merged, "additionalProperties": True', (COMPLETION,)),
)  # fmt: skip
