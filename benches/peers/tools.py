"""How each program is asked to do the same thing: its commands, as lists of words."""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
EXTRA = os.environ.get("BENCH_TOWLINE_ARGS", "").split()


def find(program):
    """The program under .peers if it is there, else on the path; None if nowhere."""
    own = [PEERS / "bin" / program, PEERS / "venv" / "bin" / program]
    return next((str(path) for path in own if path.exists()), None) or shutil.which(program)


class Tool:
    """One program with one repository in `scratch`. A verb that a program lacks is None."""

    name = program = ""
    first = again = by_stat = restore = None

    def __init__(self, scratch, store=None):
        self.scratch, self.store = scratch, store
        self.repo = store or str(scratch / "repo")
        self.env = {"PATH": os.environ["PATH"], "HOME": str(scratch / "home"), "LANG": "C.UTF-8"}

    @classmethod
    def path(cls):
        return find(cls.program)

    def init(self):
        """What must be run first, untimed."""
        return None

    def restored(self, source, out):
        """Where below `out` the tree lies."""
        return out


class Towline(Tool):
    name = program = "towline"

    @classmethod
    def path(cls):
        built = os.environ.get("TOWLINE", ROOT / "target/release/towline")
        return str(built) if Path(built).exists() else None

    def command(self, *words):
        return [self.path(), *words, "--repo", self.repo, "--json", *EXTRA]

    def init(self):
        return [self.path(), "init", self.repo]

    def first(self, source):
        return self.command("save", source, "bench", "--compression", "off")

    def again(self, source):
        return self.command("save", source, "bench", "--compression", "off", "--reread")

    def by_stat(self, source):
        return self.command("save", source, "bench", "--compression", "off")

    def restore(self, source, out):
        return self.command("restore", "bench", out)


class Restic(Tool):
    name = program = "restic"
    compression = "off"

    def command(self, *words):
        return [self.path(), "--repo", self.repo, "--compression", self.compression, "--quiet", *words]

    def __init__(self, scratch, store=None):
        super().__init__(scratch, store and f"s3:{store}")
        self.env |= {"RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": str(scratch / "cache")}

    def init(self):
        return self.command("init", "--repository-version", "2")

    def first(self, source):
        return self.command("backup", source)

    def again(self, source):
        return self.command("backup", "--force", source)

    by_stat = first

    def restore(self, source, out):
        return self.command("restore", "latest", "--target", out)

    def restored(self, source, out):
        return out / source.relative_to("/")


class Rustic(Tool):
    name = program = "rustic"

    def __init__(self, scratch, store=None):
        super().__init__(scratch, store)
        self.env |= {"RUSTIC_PASSWORD": "bench", "RUSTIC_CACHE_DIR": str(scratch / "cache")}

    def command(self, *words):
        return [self.path(), "--repository", self.repo, "--no-progress", *words]

    def init(self):
        return self.command("init", "--set-compression", "0")

    def first(self, source):
        return self.command("backup", source)

    def again(self, source):
        return self.command("backup", "--force", source)

    by_stat = first

    def restore(self, source, out):
        return self.command("restore", "latest", out)

    def restored(self, source, out):
        return out / source.relative_to("/")


class Rsync(Tool):
    name = program = "rsync"

    def first(self, source):
        return [self.path(), "-a", f"{source}/", f"{self.repo}/"]

    def again(self, source):
        return [self.path(), "-a", "--checksum", f"{source}/", f"{self.repo}/"]

    by_stat = first

    def restore(self, source, out):
        return [self.path(), "-a", f"{self.repo}/", f"{out}/"]


class Cp(Tool):
    name = program = "cp"

    def first(self, source):
        return [self.path(), "-rT", source, self.repo]

    def restore(self, source, out):
        return [self.path(), "-rT", self.repo, out]


class Floor(Tool):
    """The least that must happen: BLAKE3 over the bytes, and writing them. No names, no index, no repository."""

    name = "BLAKE3 + write"

    @classmethod
    def path(cls):
        built = os.environ.get("FLOOR", ROOT / "target/release/floor")
        return str(built) if Path(built).exists() else None

    def first(self, source):
        return [self.path(), "write", source, self.repo]

    def again(self, source):
        return [self.path(), "read", source]


class S3(Tool):
    """A program that talks to a store whose address and keys are in `store_env`; `lanes` requests at a time."""

    lanes = int(os.environ.get("BENCH_S3_CONCURRENCY", "16"))
    bucket = "towline-bench"
    store_env = {}

    def __init__(self, scratch, run):
        self.prefix = f"{self.bucket}/{self.name}-{run}"
        super().__init__(scratch, f"s3://{self.prefix}")
        self.env |= self.store_env


class S5cmd(S3):
    name = program = "s5cmd"

    def command(self, *words):
        return [self.path(), "--endpoint-url", self.store_env["AWS_ENDPOINT_URL"], "--log", "error", *words]

    def copy(self, source, target):
        # Files at once times parts of a file at once make the lanes.
        return self.command("--numworkers", "4", "cp", "--concurrency", str(self.lanes // 4), source, target)

    def first(self, source):
        return self.copy(f"{source}/", f"{self.repo}/")

    def restore(self, source, out):
        return self.copy(f"{self.repo}/*", f"{out}/")


class TowlineS3(S3, Towline):
    by_stat = None


class ResticS3(S3, Restic):
    by_stat = None

    def __init__(self, scratch, run):
        S3.__init__(self, scratch, run)
        self.repo = f"s3:{self.store_env['AWS_ENDPOINT_URL']}/{self.prefix}"
        self.env |= {"RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": str(scratch / "cache")}

    def command(self, *words):
        return super().command("--option", f"s3.connections={self.lanes}", *words)


class Rclone(S3):
    name = program = "rclone"

    def __init__(self, scratch, run):
        super().__init__(scratch, run)
        keys = self.store_env
        self.env |= {
            "RCLONE_CONFIG": str(scratch / "none"),
            "RCLONE_S3_PROVIDER": "Ceph",
            "RCLONE_S3_ENDPOINT": keys["AWS_ENDPOINT_URL"],
            "RCLONE_S3_ACCESS_KEY_ID": keys["AWS_ACCESS_KEY_ID"],
            "RCLONE_S3_SECRET_ACCESS_KEY": keys["AWS_SECRET_ACCESS_KEY"],
        }

    def copy(self, source, target):
        lanes = ["--transfers", "4", "--s3-upload-concurrency", str(self.lanes // 4)]
        lanes += ["--multi-thread-streams", str(self.lanes // 4)]
        return [self.path(), "copy", *lanes, source, target]

    def first(self, source):
        return self.copy(source, f":s3:{self.prefix}")

    def restore(self, source, out):
        return self.copy(f":s3:{self.prefix}", out)


LOCAL = [Towline, Restic, Rustic, Rsync, Cp, Floor]
REPOSITORIES = [Towline, Restic, Rustic, Cp]
STORES = [TowlineS3, S5cmd, Rclone, ResticS3]
