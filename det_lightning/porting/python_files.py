"""``port_python``: all rewrites and findings for the source of one Python file.

Change here: call a new kind of rewrite or finding, a function in a module beside this file. Modules of Determined that
have no counterpart are listed in ``det_lightning/porting/counterparts.py``.
"""

from __future__ import annotations

import re

from det_lightning.porting.bypasses import note_bypasses, note_cluster_uses, note_devices
from det_lightning.porting.counterparts import CORE_CONTEXT, counterpart, missing, missing_prefix
from det_lightning.porting.findings import Finding
from det_lightning.porting.imports import Bindings, ImportRewriter
from det_lightning.porting.older_releases import rewrite_core_api, rewrite_older_releases
from det_lightning.porting.python_syntax import PythonFile, find_classes
from det_lightning.porting.ruff_rules import may_have_old_names, port_old_names
from det_lightning.porting.strings import note_platform, note_started_commands, rewrite_strings

# Other files have nothing to port, and parsing takes time.
_WORTH_PARSING = re.compile(
    r"determined|det_lightning|model_hub|pedl|attrdict|cuda|distributed|DataParallel|horovod|apex|get_cluster_info|"
    r"DET_|\bdet\b(?=[\s\"'])|core_context\."
)


def port_python(text: str) -> tuple[str, list[Finding]]:
    """Return Python source ported to det_lightning, and findings for the rest."""
    has_old_names = may_have_old_names(text)
    if not has_old_names and not _WORTH_PARSING.search(text):
        return text, []
    file = PythonFile(text)
    if has_old_names:
        port_old_names(file)
    imports = ImportRewriter(file)
    imports.rewrite()
    ported = Bindings(file, "det_lightning")
    for use in ported.references:
        private = any(attribute.attr.value.startswith("_") for attribute in use.attributes)
        is_missing = counterpart(use.path) is None and counterpart(use.binding.path) is not None
        if use.attributes and is_missing and not private:
            file.findings.append(missing(missing_prefix(use.path), file.line(use.node)))
    if "determined" in text:
        rewrite_strings(file, imports)
    note_started_commands(file)
    note_platform(file)
    classes = find_classes(file)
    uses_trials = imports.bindings.uses_trial_api() or ported.uses_trial_api()
    if uses_trials:
        rewrite_older_releases(file, classes["trial"], classes["callback"])
    found = [*imports.bindings.found, *ported.found]
    if found or uses_trials:
        note_cluster_uses(file, {binding.name: binding.path for binding in found})
    if found or uses_trials or CORE_CONTEXT.search(text):
        rewrite_core_api(file)
    note_bypasses(file, classes["trial"])
    note_devices(file, uses_trials, imports.bindings.uses_core_api() or ported.uses_core_api())
    return file.edits.result(), file.findings
