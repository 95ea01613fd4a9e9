"""How each program is asked to keep one more step of a training run, with its own compression on."""

import subprocess

import tools
from measure import folder_bytes

PYTHON = tools.PEERS / "venv-runs/bin/python"
HERE = tools.ROOT / "benches/peers"


class Saver(tools.Tool):
    """A program that keeps step after step in one repository."""

    def keep(self, source, step):
        """The command that saves a file or folder as that step."""
        raise NotImplementedError

    def stored(self):
        """Bytes that the repository holds, by the size of its files."""
        return folder_bytes(self.scratch / "repo")[0]


class Towline(tools.Towline, Saver):
    def keep(self, source, step):
        return self.command("save", source, f"bench/step-{step}")

    def bring(self, step, out):
        return self.command("restore", f"bench/step-{step}", out)

    def settle(self, step):
        return self.command("settle", f"bench/step-{step}")

    def collect(self):
        return self.command("collect", "--grace", "0s")


class TowlinePredicting(Towline):
    name = "towline, predict"

    def keep(self, source, step):
        return [*super().keep(source, step), "--compression", "predict"]


class Restic(tools.Restic, Saver):
    compression = "auto"
    name = "restic, zstd auto"

    def keep(self, source, step):
        return self.command("backup", "--tag", f"step-{step}", source)


class ResticMax(Restic):
    compression = "max"
    name = "restic, zstd max"


class Borg(Saver):
    name, program = "borg, zstd-3", "borg"

    def __init__(self, scratch, store=None):
        super().__init__(scratch, store)
        self.env |= {
            "BORG_BASE_DIR": str(scratch / "home"),
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
            "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
        }

    def init(self):
        return [self.path(), "init", "--encryption", "none", self.repo]

    def keep(self, source, step):
        return [self.path(), "create", "--compression", "zstd,3", f"{self.repo}::step-{step}", source]


class Xet(Saver):
    name = "hf-xet"

    def __init__(self, scratch, store=None):
        super().__init__(scratch, store)
        self.env |= {"HF_XET_CACHE": str(scratch / "cache")}

    @classmethod
    def path(cls):
        return str(PYTHON) if PYTHON.exists() else None

    def keep(self, source, step):
        return [self.path(), HERE / "xet.py", self.repo, source]

    def stored(self):
        """Its xorbs and shards; not the index that only the stand-in for its server keeps."""
        held = self.scratch / "repo/xet/xorbs"
        return sum(folder_bytes(held / part)[0] for part in ("xorbs", "shards"))


SAVERS = [Towline, Restic, ResticMax, Borg, Xet]


def versions():
    """What the peers are, as far as their figures depend on it."""
    installed = tools.PEERS / "installed-runs"
    said = {"python": installed.read_text().strip() if installed.exists() else ""}
    for tool, asked in ((Restic, "version"), (Borg, "--version")):
        if tool.path():
            said[tool.program] = subprocess.run([tool.path(), asked], capture_output=True, text=True).stdout.strip()
    return said
