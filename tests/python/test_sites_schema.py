"""The JSON schema of sites files, held against the parser: `towline sites --schema` and `towline sites FILE`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import tomllib

ROOT = Path(__file__).parents[2]
TOWLINE = Path(sys.executable).with_name("towline")
SITE = "[[site]]\nname = 'a'\n[[site]]\nname = 'b'\n"
LINK = "[[link]]\nfrom = 'a'\nto = 'b'\n"


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    shown = subprocess.run([TOWLINE, "sites", "--schema"], stdout=subprocess.PIPE, check=True).stdout
    found = json.loads(shown)
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def takes(folder: Path, text: str) -> bool:
    """Whether the parser takes it."""
    (folder / "sites.toml").write_text(text)
    command = [TOWLINE, "sites", "sites.toml", "--json"]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def shipped() -> list[str]:
    (documented,) = re.findall(r"^```toml sites\n(.*?)^```", (ROOT / "docs/placement.md").read_text(), re.M | re.S)
    return [documented, *(path.read_text() for path in ROOT.glob("deploy/**/sites.toml"))]


def test_what_ships_follows_it(tmp_path: Path, schema: jsonschema.Draft202012Validator) -> None:
    texts = shipped()
    assert len(texts) >= 3
    for text in texts:
        schema.validate(tomllib.loads(text))
        assert takes(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (SITE, True),
        (f"{SITE}{LINK}price = {{ unit = 'GB', usd = '0.09' }}\n", True),
        (f"{SITE}{LINK}price = {{ usd_month = '100' }}\npath = 'dx'\nprivate = false\nrate = '1Gbit'\n", True),
        (f"{SITE}{LINK}price = {{ unit = 'GiB', tiers = [{{ up_to = 5, usd = '1' }}, {{ usd = '0' }}] }}\n", True),
        ("[[site]]\nname = 'A'\n", False),
        ("[[site]]\nprovider = 'aws'\n", False),
        ("[[site]]\nname = 'a'\nregions = 'x'\n", False),
        ("[[site]]\nname = 'a'\ngpus = [{ model = 'H100', count = -1, usd_hour = '1' }]\n", False),
        ("[[site]]\nname = 'a'\ngpus = [{ model = 'H100', count = 1, usd_hour = '-1' }]\n", False),
        ("[[site]]\nname = 'a'\ncache = 5\n", False),
        (f"{SITE}{LINK}", False),
        (f"{SITE}{LINK}price = {{ unit = 'TB', usd = '1' }}\n", False),
        (f"{SITE}{LINK}price = {{ unit = 'GB' }}\n", False),
        (f"{SITE}{LINK}price = {{ unit = 'GB', usd = '1', tiers = [{{ usd = '1' }}] }}\n", False),
        (f"{SITE}{LINK}price = {{ unit = 'GB', usd = '0.1234567' }}\n", False),
        ("[[place]]\nname = 'a'\n", False),
    ],
)
def test_it_takes_what_the_parser_takes(
    tmp_path: Path, schema: jsonschema.Draft202012Validator, text: str, good: bool
) -> None:
    assert schema.is_valid(tomllib.loads(text)) == good
    assert takes(tmp_path, text) == good
