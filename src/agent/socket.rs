//! The Unix socket: its path, permissions, and the lock that admits one agent at a time.

use std::env;
use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::{Uid, geteuid};
use tokio::net::UnixListener;

use crate::error::{Error, Result};
use crate::id::ObjectId;
use crate::tree::{check_own_folder, make_private_folder};

/// Limit of the path of a socket, in bytes.
pub(super) const SOCKET_PATH_MAX: usize = 107;
/// Length of the accept queue.
const BACKLOG: i32 = 128;

/// Default path of the socket: `$XDG_RUNTIME_DIR/towline/agent.sock`, else in a private folder of the user in the folder for
/// temporary files (<https://specifications.freedesktop.org/basedir-spec/latest/>).
#[must_use]
pub fn well_known() -> PathBuf {
    well_known_in(env::var_os("XDG_RUNTIME_DIR"), rustix::process::getuid().as_raw())
}

fn well_known_in(runtime: Option<OsString>, user: u32) -> PathBuf {
    let runtime = runtime.map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = runtime.map_or_else(|| format!("/tmp/towline-{user}").into(), |folder| folder.join("towline"));
    folder.join("agent.sock")
}

/// Socket of this agent, removed on drop.
#[derive(Debug)]
pub(super) struct Claimed {
    path: PathBuf,
    /// Lock that the listening agent holds.
    _lock: File,
}

impl Claimed {
    /// Listens on `path`, which only this user can open. Replaces the socket of a killed agent. Needs a runtime.
    ///
    /// # Errors
    /// Conflict, if another agent or another kind of file is there; denied, if other users could replace the socket.
    pub(super) fn listen(path: &Path) -> Result<(Self, UnixListener)> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let io = |error| Error::io("cannot create the agent's socket", path, error);
        if path == well_known() {
            make_private_folder(folder).map_err(|error| error.help("remove it, or set `socket`"))?;
        } else {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io)?;
            check_own_folder(folder).map_err(|error| {
                error.help("set `socket` to a path in a folder that does not exist: the agent creates it")
            })?;
        }
        let lock = lock(path)?;
        clear(path)?;
        let address = SocketAddrUnix::new(path).map_err(|error| io(error.into()))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listening = (|| {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // The file is created with the socket's own mode, so others can never connect
            // (<https://github.com/torvalds/linux/blob/v6.12/net/unix/af_unix.c#L1221>, unix_bind_bsd).
            fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
            bind(&socket, &address)?;
            listen(&socket, BACKLOG)?;
            Ok::<OwnedFd, rustix::io::Errno>(socket)
        })();
        let socket = listening.map_err(|error| io(error.into()))?;
        let listener = UnixListener::from_std(socket.into()).map_err(io)?;
        Ok((Self { path: path.to_owned(), _lock: lock }, listener))
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        // The lock is still held, so these are our own socket and token. The next agent replaces files that cannot be removed
        // here.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(token_path(&self.path));
    }
}

/// Locks the socket at `path` for this process.
fn lock(path: &Path) -> Result<File> {
    let lock = path.with_extension("lock");
    let io = |error| Error::io("cannot lock the agent's socket", &lock, error);
    let no_link = OFlags::NOFOLLOW.bits().cast_signed();
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false).mode(0o600).custom_flags(no_link);
    let file = options.open(&lock).map_err(io)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(taken(path)),
        Err(error) => Err(io(error.into())),
    }
}

/// Removes the socket of an agent that no longer runs.
fn clear(path: &Path) -> Result<()> {
    let found = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(|error| Error::io("cannot inspect the agent's socket", path, error))?,
    };
    if !found.file_type().is_socket() {
        return Err(Error::conflict("file at the socket's path is no socket").at(path.display()).help("remove it"));
    }
    match UnixStream::connect(path) {
        // Its process is gone, so nobody listens on it.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)
            .map_err(|error| Error::io("cannot remove the socket of an agent that no longer runs", path, error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => Err(taken(path)),
    }
}

fn taken(path: &Path) -> Error {
    Error::conflict("another agent listens on this socket")
        .at(path.display())
        .help("stop it first, or set `socket` to another path")
}

/// True if a process of `user` may connect to the agent: its own user, or root. The mode of the socket enforces the same unless
/// somebody changes it.
pub(super) fn may_connect(user: Uid) -> bool {
    user == geteuid() || user.is_root()
}

/// True if this process may use an agent of `user`: its own user, or root. Root may use any agent, unless it takes data from it
/// that it does not verify itself.
pub(super) fn may_answer(user: Uid, is_verified: bool) -> bool {
    may_connect(user) || is_verified && geteuid().is_root()
}

/// Path of the token for the API on loopback.
pub(super) fn token_path(socket: &Path) -> PathBuf {
    socket.with_extension("token")
}

/// A secret of 256 bits, as hexadecimal digits.
pub(super) fn random_secret() -> String {
    // Each ULID has 80 random bits from a generator that the operating system seeds.
    let random: Vec<u8> = (0..4).flat_map(|_| ObjectId::random().to_bytes()).collect();
    blake3::Hash::from_bytes(blake3::derive_key("towline agent token", &random)).to_hex().to_string()
}

/// Writes a new token for the API on loopback beside the socket, readable by this user only; the agent removes it when it ends.
///
/// # Errors
/// As the file system says.
pub(super) fn write_token(socket: &Path) -> Result<String> {
    let path = token_path(socket);
    let io = |error| Error::io("cannot write the agent's token", &path, error);
    let token = random_secret();
    // An existing file may be open in another process, so it is replaced instead of overwritten.
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    created.and_then(|mut file| writeln!(file, "{token}")).map_err(io)?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_well_known_socket_is_the_users_own() {
        assert_eq!(well_known_in(Some("/run/user/7".into()), 7), Path::new("/run/user/7/towline/agent.sock"));
        for unset in [None, Some("".into()), Some("relative".into())] {
            assert_eq!(well_known_in(unset, 7), Path::new("/tmp/towline-7/agent.sock"));
        }
    }

    #[tokio::test]
    async fn one_agent_at_a_time_and_a_dead_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/agent.sock");
        let (claimed, listener) = Claimed::listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(dir.path().join("run")).unwrap().mode() & 0o777, 0o700);
        assert_eq!(Claimed::listen(&path).unwrap_err().kind(), ErrorKind::Conflict);
        // Killed: the socket stays, the lock goes.
        drop(listener);
        let Claimed { _lock: lock, .. } = &claimed;
        flock(lock, FlockOperation::Unlock).unwrap();
        let (second, _listener) = Claimed::listen(&path).unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_is_no_agents_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(Claimed::listen(&path).unwrap_err().kind(), ErrorKind::Conflict);
        drop(other);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert!(Claimed::listen(&path).unwrap_err().to_string().contains("no socket"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test]
    async fn a_socket_lies_where_nobody_else_can_put_one() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};

        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("shared");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = Claimed::listen(&folder.join("agent.sock")).unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Denied, folder.to_str()), "{error}");
        // In one that the agent makes there it can be.
        drop(Claimed::listen(&folder.join("own/agent.sock")).unwrap());
        // A link in the place of the lock leads nowhere.
        let precious = dir.path().join("precious");
        symlink(&precious, dir.path().join("agent.lock")).unwrap();
        assert!(Claimed::listen(&dir.path().join("agent.sock")).is_err());
        assert!(!precious.exists());
    }

    #[test]
    fn only_this_user_and_root_connect() {
        let (own, other) = (geteuid(), Uid::from_raw(4711));
        assert!(may_connect(own) && may_connect(Uid::ROOT) && !may_connect(other));
        for is_verified in [true, false] {
            assert!(may_answer(own, is_verified) && may_answer(Uid::ROOT, is_verified));
            assert_eq!(may_answer(other, is_verified), is_verified && own.is_root());
        }
    }

    #[test]
    fn a_token_is_fresh_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let (first, second) = (write_token(&socket).unwrap(), write_token(&socket).unwrap());
        assert_ne!(first, second);
        let file = dir.path().join("agent.token");
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), second);
        assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    }
}
