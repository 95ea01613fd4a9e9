//! A checkpoint as one stream of bytes between agents (docs/protocol.md, "Handoff"). Blocking.
//!
//! ```text
//! archive = record+ end          the first is the checkpoint itself; all others are in it
//! record = length of the head (u32) | head | a file's bytes | their BLAKE3
//! head   = kind (u8) | path | mode | mtime | length of the file, or target of the link
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::path_memory::HeldPaths;
use crate::budget::Budget;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::wire::{Reader, Writer};
use crate::limits::{MIB, PATH_LEN_MAX};
use crate::tree::{Opened, Rules, Target, Walk, WalkEntry, WalkKind, walk};

/// Segments of a path, at most: to reach a folder costs time for each.
const DEPTH_MAX: usize = 64;
/// Limit of a head, in bytes: two paths and a few numbers.
const HEAD_LEN_MAX: usize = 2 * PATH_LEN_MAX + 64;
/// Buffer size, in bytes.
const PIECE: usize = 1 << 20;
/// Space charged for each file, folder or link besides its bytes, so that names alone cannot fill a disk.
const ENTRY_SPACE: u64 = 4096;
/// Memory for each entry besides its path, in bytes.
const ENTRY_MEMORY: u64 = 96;
/// Limit of folders in a checkpoint: they are in memory until the end.
const FOLDERS_MAX: usize = 16_384;
/// Limits of files, folders and links of a checkpoint, and of the bytes of their paths and targets: all are in memory when it is saved.
const ENTRIES_MAX: usize = 1 << 18;
const PATHS_LEN_MAX: usize = 32 << 20;
/// Modes on the receiver's disk, whatever they were at the sender: only the receiver can read them.
const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;
/// Bytes written between syncs of a file, so that the sender sees progress.
const SYNC_EVERY: u64 = 256 * MIB;
/// Kept bits of a mode: another agent cannot set setuid or setgid.
const MODE_KEPT: u32 = 0o777;

const END: u8 = 0;
const FILE: u8 = 1;
const FOLDER: u8 = 2;
const LINK: u8 = 3;

/// The sender's modes of files and folders, by path in the checkpoint; empty for a checkpoint that is a folder.
pub(super) type Modes = BTreeMap<Vec<u8>, u32>;

/// A checkpoint that was received.
#[derive(Debug)]
pub(super) struct Received {
    /// Its file name or folder name.
    pub(super) entry: Vec<u8>,
    pub(super) modes: Modes,
    _held: HeldPaths,
}

/// Files to send.
#[derive(Debug)]
pub(in crate::agent) struct Contents {
    /// Its file name or folder name.
    entry: Vec<u8>,
    walk: Walk,
}

impl Contents {
    /// Folder or file at `path`, whose entries count in the budget `memory`, if there is one.
    ///
    /// # Errors
    /// As the file system says; usage, for a path without a name; exhausted, for too many entries.
    pub(in crate::agent) fn find(path: &Path, memory: Option<Budget>) -> Result<Self> {
        let name = path.file_name().ok_or_else(|| Error::usage("checkpoint has no name").at(path.display()))?;
        // The owner of the folder may have put a link in the place of the checkpoint.
        let rules = Rules { no_follow: true, memory, ..Rules::default() };
        Ok(Self { entry: name.as_bytes().to_vec(), walk: walk(path, &rules)? })
    }

    /// Space that it takes, in bytes, as [`receive`] charges it.
    pub(in crate::agent) fn space(&self) -> u64 {
        let space = |found: &WalkEntry| if found.kind == WalkKind::File { found.stat.size } else { 0 } + ENTRY_SPACE;
        self.walk.found.iter().map(space).sum()
    }

    /// Digest of all paths, sizes, inodes and modification times.
    pub(in crate::agent) fn fingerprint(&self) -> blake3::Hash {
        let mut writer = Writer::new();
        for found in &self.walk.found {
            writer.string(&found.path).u64(found.stat.size).u64(found.stat.ino).signed(found.stat.mtime.0);
        }
        blake3::hash(&writer.into_bytes())
    }

    /// Writes all of it to `out`.
    ///
    /// # Errors
    /// Conflict, if a file changes meanwhile; unreachable, if `out` fails.
    pub(in crate::agent) fn send(&self, out: &mut impl Write) -> Result<()> {
        let mut piece = vec![0; PIECE];
        for found in &self.walk.found {
            let path = self.path(found);
            let (kind, rest) = match &found.kind {
                WalkKind::File => (FILE, None),
                WalkKind::Folder => (FOLDER, None),
                WalkKind::Symlink { target } => (LINK, Some(target)),
            };
            let mut head = Writer::new();
            head.u8(kind).string(&path).varint(found.stat.mode.into()).signed(found.stat.mtime.0);
            match rest {
                None if kind == FILE => head.varint(found.stat.size),
                None => &mut head,
                Some(target) => head.string(target),
            };
            send_head(head, out)?;
            if kind == FILE {
                self.send_file(found, &mut piece, out)?;
            }
        }
        let mut end = Writer::new();
        end.u8(END);
        send_head(end, out)?;
        out.flush().map_err(broken)
    }

    fn path(&self, found: &WalkEntry) -> Vec<u8> {
        match found.path.as_slice() {
            _ if self.walk.is_file() => self.entry.clone(),
            b"" => self.entry.clone(),
            path => [&self.entry, b"/".as_slice(), path].concat(),
        }
    }

    fn send_file(&self, found: &WalkEntry, piece: &mut [u8], out: &mut impl Write) -> Result<()> {
        let changed = || {
            Error::conflict("file changed while it was sent")
                .at(String::from_utf8_lossy(&found.path))
                .help("it is sent again once its writer is done")
        };
        let Opened::File(mut file) = self.walk.open(found)? else { return Err(changed()) };
        let (mut hasher, mut left) = (blake3::Hasher::new(), found.stat.size);
        while left > 0 {
            let want = usize::try_from(left).map_or(piece.len(), |left| left.min(piece.len()));
            let read = file.read(&mut piece[..want]);
            let read =
                read.map_err(|source| Error::io("cannot read a file to send", &shown(&self.path(found)), source))?;
            if read == 0 {
                return Err(changed());
            }
            hasher.update(&piece[..read]);
            out.write_all(&piece[..read]).map_err(broken)?;
            left -= read as u64;
        }
        let now = crate::tree::Stat::of(&file).map_err(broken)?;
        if (now.size, now.mtime) != (found.stat.size, found.stat.mtime) {
            return Err(changed());
        }
        out.write_all(hasher.finalize().as_bytes()).map_err(broken)
    }
}

fn send_head(head: Writer, out: &mut impl Write) -> Result<()> {
    let head = head.into_bytes();
    let len = u32::try_from(head.len()).map_err(|_| malformed("head is too long"))?;
    out.write_all(&len.to_le_bytes()).and_then(|()| out.write_all(&head)).map_err(broken)
}

/// Writes the checkpoint from `input` below `target`, readable by this user alone. It must take exactly `space` bytes. On return it
/// survives a power loss if the target's files do.
///
/// # Errors
/// Damaged, for a malformed or corrupted archive; exhausted, for more than was announced, or a full disk; unreachable, if it ends
/// too early.
pub(super) fn receive(input: &mut impl Read, target: &Target, space: u64, mut held: HeldPaths) -> Result<Received> {
    let (mut piece, mut folders, mut left) = (vec![0; PIECE], 0, space);
    // Modes of all, and times of folders, which are set at the end.
    let (mut top, mut found) = (None::<Vec<u8>>, BTreeMap::<Vec<u8>, (u32, Option<Timestamp>)>::new());
    let (mut entries, mut paths_len) = (0, 0);
    while let Some(Head { kind, path, mode, mtime }) = Head::receive(input)? {
        let len = if let Kind::File(len) = kind { len } else { 0 };
        let rest = len.checked_add(ENTRY_SPACE).and_then(|took| left.checked_sub(took));
        left = rest.ok_or_else(|| {
            Error::exhausted("checkpoint is larger than announced").expected(format!("{space} bytes"))
        })?;
        entries += 1;
        held.add(path.len() as u64 + ENTRY_MEMORY)?;
        paths_len += path.len() + if let Kind::Link(to) = &kind { to.len() } else { 0 };
        if entries > ENTRIES_MAX || paths_len > PATHS_LEN_MAX {
            return Err(Error::exhausted("checkpoint has too many files, or their paths are too long")
                .expected(format!("at most {ENTRIES_MAX} files, folders and links, and {PATHS_LEN_MAX} bytes of paths"))
                .help("save it instead"));
        }
        if path.split(|byte| *byte == b'/').count() > DEPTH_MAX {
            return Err(Error::exhausted("folders of a checkpoint are nested too deeply")
                .at(shown(&path).display())
                .expected(format!("at most {DEPTH_MAX} segments in a path"))
                .help("save it instead"));
        }
        match &top {
            None if path.contains(&b'/') || matches!(kind, Kind::Link(_)) => {
                return Err(malformed("first record is no file or folder with a plain name"));
            }
            None => top = Some(path.clone()),
            Some(top) if path.strip_prefix(top.as_slice()).is_some_and(|below| below.starts_with(b"/")) => {}
            Some(_) => return Err(malformed("record is outside of the checkpoint")),
        }
        match kind {
            Kind::Folder if folders == FOLDERS_MAX => return Err(malformed("too many folders")),
            Kind::Folder => {
                target.make_folder(&path)?;
                folders += 1;
                found.insert(below_top(&path), (mode, Some(mtime)));
            }
            Kind::Link(to) => target.symlink(&path, &to, mtime)?,
            Kind::File(len) => {
                let staged = target.stage(&path, len)?;
                receive_file(input, &path, len, &mut piece, staged.file())?;
                staged.finish(FILE_MODE, mtime)?;
                let is_top = top.as_ref() == Some(&path);
                found.insert(if is_top { path } else { below_top(&path) }, (mode, None));
            }
        }
    }
    if left > 0 {
        return Err(malformed("checkpoint is smaller than announced"));
    }
    let entry = top.ok_or_else(|| malformed("empty archive"))?;
    // Entries of a folder come after it in the order of paths.
    for (path, (_, mtime)) in found.iter().rev() {
        let Some(mtime) = mtime else { continue };
        let path = if path.is_empty() { entry.clone() } else { [&entry, b"/".as_slice(), path].concat() };
        target.set_folder(&path, FOLDER_MODE, *mtime)?;
    }
    target.flush()?;
    let modes = found.into_iter().map(|(path, (mode, _))| (path, mode)).collect();
    Ok(Received { entry, modes, _held: held })
}

/// Path of a record, relative to the checkpoint.
fn below_top(path: &[u8]) -> Vec<u8> {
    path.iter().position(|byte| *byte == b'/').map_or_else(Vec::new, |slash| path[slash + 1..].to_vec())
}

/// Encodes the file `modes`.
pub(super) fn encode_modes(modes: &Modes) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.count(modes.len());
    for (path, mode) in modes {
        writer.string(path).varint((*mode).into());
    }
    writer.into_bytes()
}

/// # Errors
/// Damaged, if malformed.
pub(super) fn decode_modes(bytes: &[u8]) -> Result<Modes> {
    let (mut reader, mut modes) = (Reader::new(bytes), Modes::new());
    for _ in 0..reader.count(2)? {
        let path = reader.string(PATH_LEN_MAX)?.to_vec();
        modes.insert(path, reader.varint32()? & MODE_KEPT);
    }
    reader.finish()?;
    Ok(modes)
}

fn receive_file(input: &mut impl Read, path: &[u8], len: u64, piece: &mut [u8], mut out: &File) -> Result<()> {
    let (mut hasher, mut left, mut unsynced) = (blake3::Hasher::new(), len, 0);
    let io = |source| Error::io("cannot write a handed-off file", &shown(path), source);
    while left > 0 {
        let want = usize::try_from(left).map_or(piece.len(), |left| left.min(piece.len()));
        input.read_exact(&mut piece[..want]).map_err(broken)?;
        hasher.update(&piece[..want]);
        out.write_all(&piece[..want]).map_err(io)?;
        left -= want as u64;
        unsynced += want as u64;
        if unsynced >= SYNC_EVERY {
            out.sync_data().map_err(io)?;
            unsynced = 0;
        }
    }
    let mut expected = [0; blake3::OUT_LEN];
    input.read_exact(&mut expected).map_err(broken)?;
    if hasher.finalize() == expected {
        return Ok(());
    }
    Err(Error::damaged("file was damaged on the way")
        .at(shown(path).display())
        .expected(blake3::Hash::from(expected))
        .got(hasher.finalize()))
}

/// Header of a file, a folder or a link.
struct Head {
    kind: Kind,
    path: Vec<u8>,
    mode: u32,
    mtime: Timestamp,
}

enum Kind {
    File(u64),
    Folder,
    Link(Vec<u8>),
}

impl Head {
    /// Reads the next one; None at the end.
    fn receive(input: &mut impl Read) -> Result<Option<Self>> {
        let mut len = [0; 4];
        input.read_exact(&mut len).map_err(broken)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > HEAD_LEN_MAX {
            return Err(malformed("head is too long"));
        }
        let mut head = vec![0; len];
        input.read_exact(&mut head).map_err(broken)?;
        let mut reader = Reader::new(&head);
        let kind = reader.u8()?;
        if kind == END {
            reader.finish()?;
            return Ok(None);
        }
        let path = reader.string(PATH_LEN_MAX)?.to_vec();
        let (mode, mtime) = (reader.varint32()? & MODE_KEPT, Timestamp(reader.signed()?));
        let kind = match kind {
            FILE => Kind::File(reader.varint()?),
            FOLDER => Kind::Folder,
            LINK => Kind::Link(reader.string(PATH_LEN_MAX)?.to_vec()),
            _ => return Err(malformed("unknown kind of record")),
        };
        reader.finish()?;
        Ok(Some(Self { kind, path, mode, mtime }))
    }
}

/// Path for error messages.
fn shown(path: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(path))
}

fn malformed(what: &'static str) -> Error {
    Error::damaged("malformed handoff archive").got(what)
}

fn broken(source: std::io::Error) -> Error {
    Error::unreachable("sender disconnected early").source(source)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::super::path_memory::PathMemory;
    use super::*;
    use crate::error::ErrorKind;
    use crate::identity::Identity;
    use crate::tree::Durability;

    /// The room of [`checkpoint`]: two files, three folders, a link.
    const SPACE: u64 = (3 << 20) + 6 * ENTRY_SPACE;

    fn sent(path: &Path) -> Vec<u8> {
        let mut bytes = Vec::new();
        Contents::find(path, None).unwrap().send(&mut bytes).unwrap();
        bytes
    }

    fn put(bytes: &[u8], to: &Path, space: u64) -> Result<Received> {
        let held = PathMemory::default().of(&Identity::new("west", "a").unwrap());
        receive(&mut &*bytes, &Target::open(to, Durability::Power).unwrap(), space, held)
    }

    fn checkpoint(dir: &Path) -> PathBuf {
        let made = dir.join("from/checkpoint-5");
        fs::create_dir_all(made.join("deep/empty")).unwrap();
        fs::write(made.join("model.bin"), vec![7; 3 << 20]).unwrap();
        fs::write(made.join("deep/empty.bin"), b"").unwrap();
        fs::set_permissions(made.join("model.bin"), fs::Permissions::from_mode(0o640)).unwrap();
        symlink("../model.bin", made.join("deep/link")).unwrap();
        made
    }

    /// A archive of records as somebody else might write them: kind, path, and what is linked to.
    fn written(records: &[(u8, &str, &str)]) -> Vec<u8> {
        let mut archive = Vec::new();
        for (kind, path, to) in records {
            let mut head = Writer::new();
            head.u8(*kind).string(path.as_bytes()).varint(0o4755).signed(0);
            match *kind {
                FILE => drop(head.varint(0)),
                LINK => drop(head.string(to.as_bytes())),
                _ => {}
            }
            send_head(head, &mut archive).unwrap();
            if *kind == FILE {
                archive.extend(blake3::hash(b"").as_bytes());
            }
        }
        let mut end = Writer::new();
        end.u8(END);
        send_head(end, &mut archive).unwrap();
        archive
    }

    #[test]
    fn folders_are_nested_so_deeply_and_no_deeper() {
        let dir = tempfile::tempdir().unwrap();
        let nested = |depth: usize| -> Vec<String> { (1..=depth).map(|depth| vec!["d"; depth].join("/")).collect() };
        let archive = |paths: &[String]| {
            let records: Vec<_> = paths.iter().map(|path| (FOLDER, path.as_str(), "")).collect();
            (written(&records), paths.len() as u64 * ENTRY_SPACE)
        };
        let (fits, space) = archive(&nested(DEPTH_MAX));
        put(&fits, &dir.path().join("fits"), space).unwrap();
        let (deeper, space) = archive(&nested(DEPTH_MAX + 1));
        let error = put(&deeper, &dir.path().join("deeper"), space).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
        assert!(error.to_string().contains("nested too deeply"), "{error}");
    }

    #[test]
    fn it_comes_out_as_it_went_in() {
        let dir = tempfile::tempdir().unwrap();
        let made = checkpoint(dir.path());
        let received = put(&sent(&made), &dir.path().join("to"), SPACE).unwrap();
        assert_eq!(received.entry, b"checkpoint-5");
        let found = |path: &Path| walk(path, &Rules::default()).unwrap().found;
        let fingerprint = |path: &Path| {
            let of = |found: WalkEntry| (found.path, found.kind.clone(), found.stat.mtime);
            found(path).into_iter().map(of).collect::<Vec<_>>()
        };
        let came = dir.path().join("to/checkpoint-5");
        assert_eq!(fingerprint(&came), fingerprint(&made));
        // The modes that the sender had are told, and on the disk all is this user's alone.
        for (there, here) in found(&came).iter().zip(found(&made)) {
            let kept = match there.kind {
                WalkKind::File => 0o600,
                WalkKind::Folder => 0o700,
                WalkKind::Symlink { .. } => continue,
            };
            assert_eq!((there.stat.mode & 0o7777, received.modes[&there.path]), (kept, here.stat.mode & 0o777));
        }
        assert_eq!(decode_modes(&encode_modes(&received.modes)).unwrap(), received.modes);
        assert_eq!(fs::read(came.join("deep/link")).unwrap(), vec![7; 3 << 20]);
        // A checkpoint may be one file.
        let one = put(&sent(&made.join("model.bin")), &dir.path().join("one"), (3 << 20) + ENTRY_SPACE).unwrap();
        assert_eq!(one.modes, Modes::from([(b"model.bin".to_vec(), 0o640)]));
        assert_eq!(fs::read(dir.path().join("one/model.bin")).unwrap(), vec![7; 3 << 20]);
    }

    #[test]
    fn what_is_not_whole_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let whole = sent(&checkpoint(dir.path()));
        for (part, len) in (0..whole.len()).step_by(60_007).chain([whole.len() - 1]).enumerate() {
            let to = dir.path().join(format!("cut-{part}"));
            assert_eq!(put(&whole[..len], &to, SPACE).unwrap_err().kind(), ErrorKind::Unreachable, "{len}");
        }
        let mut bent = whole.clone();
        let middle = bent.len() / 2;
        bent[middle] ^= 1;
        assert_eq!(put(&bent, &dir.path().join("bent"), SPACE).unwrap_err().kind(), ErrorKind::Damaged);
        assert_eq!(put(&whole, &dir.path().join("much"), SPACE - 1).unwrap_err().kind(), ErrorKind::Exhausted);
        assert_eq!(put(&whole, &dir.path().join("less"), SPACE + 1).unwrap_err().kind(), ErrorKind::Damaged);
    }

    #[test]
    fn nothing_leads_out_of_the_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().to_str().unwrap();
        let put = |records: &[(u8, &str, &str)]| {
            put(&written(records), &dir.path().join("to"), ENTRY_SPACE * records.len() as u64)
        };
        let received = put(&[(FOLDER, "c", ""), (LINK, "c/l", outside), (FILE, "c/f", "")]).unwrap();
        let mode = fs::metadata(dir.path().join("to/c/f")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, FILE_MODE);
        assert_eq!(received.modes[&b"f".to_vec()], 0o755, "nobody else's user is set");
        for first in ["../out", "/tmp/out", "a/b", "", ".", "..", "a\0b"] {
            assert_eq!(put(&[(FILE, first, "")]).unwrap_err().kind(), ErrorKind::Damaged, "{first}");
        }
        for later in ["out", "cc/x", "c", "c/../out", "c/../../out", "/c/x", "c//x"] {
            let error = put(&[(FOLDER, "c", ""), (FILE, later, "")]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{later}");
        }
        assert_eq!(put(&[(LINK, "c", outside)]).unwrap_err().kind(), ErrorKind::Damaged, "what is saved is no link");
        assert!(put(&[(FOLDER, "c", ""), (LINK, "c/l", outside), (FILE, "c/l/out", "")]).is_err());
        assert_eq!(put(&[]).unwrap_err().kind(), ErrorKind::Damaged);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_no_parcel_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for rubbish in [vec![0xff; 64], [&[1, 0, 0, 0, 9], [0; 64].as_slice()].concat(), vec![2, 0, 0, 0, 0, 0]] {
            assert_eq!(put(&rubbish, &dir.path().join("to"), 9).unwrap_err().kind(), ErrorKind::Damaged);
        }
        let many: Vec<String> = (0..FOLDERS_MAX).map(|n| format!("c/{n}")).collect();
        let many: Vec<_> =
            [(FOLDER, "c", "")].into_iter().chain(many.iter().map(|path| (FOLDER, &**path, ""))).collect();
        let error = put(&written(&many), &dir.path().join("to"), u64::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged, "memory for folders is bounded");
    }

    #[test]
    fn targets_of_links_count_as_paths() {
        let dir = tempfile::tempdir().unwrap();
        let target = "t".repeat(4000);
        let links: Vec<String> = (0..=PATHS_LEN_MAX / 4000).map(|n| format!("c/{n}")).collect();
        let all: Vec<_> =
            [(FOLDER, "c", "")].into_iter().chain(links.iter().map(|path| (LINK, &**path, &*target))).collect();
        let error = put(&written(&all), &dir.path().join("to"), u64::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
    }

    #[test]
    fn a_file_that_changes_while_it_is_sent_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let made = checkpoint(dir.path());
        let found = Contents::find(&made, None).unwrap();
        let before = found.fingerprint();
        fs::write(made.join("model.bin"), vec![8; 2 << 20]).unwrap();
        assert_eq!(found.send(&mut std::io::sink()).unwrap_err().kind(), ErrorKind::Conflict);
        assert_ne!(Contents::find(&made, None).unwrap().fingerprint(), before);
        assert_eq!(found.space(), SPACE);
    }
}
