//! Store in a directory that writes large objects with direct I/O.
//!
//! A pack is written once, and read much later or never. With the page cache, all bytes would be copied to fresh memory, evict
//! data that other programs read, and be written by `fsync` in the end. `O_DIRECT`
//! (<https://man7.org/linux/man-pages/man2/open.2.html>) writes aligned blocks directly to the disk: in measurements a gigabyte
//! is durable in a half to a tenth of the time, with a fraction of the CPU time. If a file system does not support it, the same
//! blocks are written as usual.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt as _};
use std::path::{Path as FilePath, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, Extensions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::home::{Home, plain};
use super::modes::Modes;

/// Minimum bytes of an object that is written directly.
const LARGE: usize = 2 << 20;
/// Bytes of one write.
const BLOCK: usize = 2 << 20;
/// Alignment of addresses, lengths and offsets, sufficient for all current disks.
const ALIGN: usize = 4096;

/// Local files; large ones are written directly. They are staged and published like those of `LocalFileSystem`: see
/// [`super::staging_files`].
#[derive(Debug)]
pub(super) struct Direct {
    inner: LocalFileSystem,
    home: Home,
    root: PathBuf,
    modes: Modes,
}

impl Direct {
    /// Wraps `inner`, which must be at `home` and sync its writes; files and folders below `root` get `modes`.
    pub(super) fn new(inner: LocalFileSystem, home: Home, root: PathBuf, modes: Modes) -> Self {
        Self { inner, home, root, modes }
    }

    /// Path of `location`; creates its folders.
    async fn place(&self, location: &Path) -> Result<PathBuf> {
        let path = self.inner.path_to_filesystem(location)?;
        let (modes, root, placed) = (self.modes, self.root.clone(), path.clone());
        blocking(move || modes.make_folders(&root, placed.parent().unwrap_or(&root))).await?;
        Ok(path)
    }

    async fn put_anywhere(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let path = self.place(location).await?;
        let modes = self.modes;
        let plain = matches!(opts.mode, PutMode::Overwrite) && opts.attributes.is_empty();
        if !plain || payload.content_length() < LARGE {
            let put = self.inner.put_opts(location, payload, opts).await?;
            blocking(move || modes.set_file(&path)).await?;
            return Ok(put);
        }
        blocking(move || put(&path, &payload, modes)).await?;
        Ok(PutResult { e_tag: None, version: None, extensions: Extensions::default() })
    }

    /// Metadata of `listed`, if it still exists.
    fn listed(
        &self,
        prefix: Option<&Path>,
        listed: BoxStream<'static, Result<ObjectMeta>>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (home, root, prefix) = (self.home.clone(), self.root.clone(), prefix.cloned().unwrap_or_default());
        // A file whose name is no key is no object of this repository, nor is one below a symbolic link.
        let keys = listed.filter(|meta| std::future::ready(!matches!(meta, Err(Error::InvalidPath { .. }))));
        let own = keys.try_filter(move |meta| std::future::ready(plain(&root, &meta.location).is_ok()));
        stream::once(async move { home.check_at(&prefix).await.map(|()| own) }).try_flatten().boxed()
    }
}

impl fmt::Display for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for Direct {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.home.check_at(location).await?;
        let put = self.put_anywhere(location, payload, opts).await?;
        // Checked last: a write to another directory must not be acknowledged.
        self.home.check().await?;
        Ok(put)
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.home.check_at(location).await?;
        let path = self.place(location).await?;
        let inner = self.inner.put_multipart_opts(location, opts).await?;
        Ok(Box::new(Upload { inner, path, modes: self.modes }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.home.check_at(location).await?;
        self.inner.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.home.check_at(location).await?;
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let root = self.root.clone();
        let own =
            locations.map(move |location| location.and_then(|location| plain(&root, &location).map(|()| location)));
        self.inner.delete_stream(own.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(prefix, self.inner.list(prefix))
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(prefix, self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.home.check_at(prefix.unwrap_or(&Path::default())).await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.home.check_at(from).await?;
        self.home.check_at(to).await?;
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.home.check_at(from).await?;
        self.home.check_at(to).await?;
        self.inner.rename_opts(from, to, options).await
    }
}

/// A multipart upload whose file gets its mode when it is complete.
#[derive(Debug)]
struct Upload {
    inner: Box<dyn MultipartUpload>,
    path: PathBuf,
    modes: Modes,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.inner.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let put = self.inner.complete().await?;
        let (modes, path) = (self.modes, self.path.clone());
        blocking(move || modes.set_file(&path)).await?;
        Ok(put)
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|stopped| Err(io::Error::other(stopped))).map_err(generic)
}

fn generic(source: io::Error) -> Error {
    Error::Generic { store: "directory", source: Box::new(source) }
}

/// Writes `payload` durably to `path`: staged, synced, renamed, and the folder synced.
fn put(path: &FilePath, payload: &PutPayload, modes: Modes) -> io::Result<()> {
    let (file, staged) = stage(path, modes)?;
    let publish = || {
        modes.set_open_file(&file)?;
        write(&file, payload)?;
        file.sync_all()?;
        std::fs::rename(&staged, path)?;
        path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    };
    publish().inspect_err(|_| {
        // Best effort: a leftover only costs space.
        let _ = std::fs::remove_file(&staged);
    })
}

/// Creates a staging file beside `path`, in an existing folder.
fn stage(path: &FilePath, modes: Modes) -> io::Result<(File, PathBuf)> {
    let mut number = 1;
    loop {
        let mut staged = path.as_os_str().to_owned();
        staged.push(format!("#{number}"));
        match OpenOptions::new().write(true).create_new(true).mode(modes.file).open(&staged) {
            Ok(file) => return Ok((file, staged.into())),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Writes `payload` to `file`, which is empty.
fn write(file: &File, payload: &PutPayload) -> io::Result<()> {
    let len = payload.content_length() as u64;
    let reserved = fallocate(file, FallocateFlags::empty(), 0, len);
    // Reports a full disk before a byte is written. A file system without this operation is no error.
    if let Err(full @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) = reserved {
        return Err(full.into());
    }
    let mut blocks = Blocks::new(file);
    for part in payload {
        blocks.take(part)?;
    }
    blocks.finish()?;
    // The last block was padded.
    file.set_len(len)
}

/// Writer that collects bytes to aligned blocks.
struct Blocks<'a> {
    file: &'a File,
    direct: bool,
    memory: Vec<u8>,
    /// Start of the block in `memory`, and its filled length.
    start: usize,
    filled: usize,
    /// Offset in the file.
    at: u64,
}

impl<'a> Blocks<'a> {
    fn new(file: &'a File) -> Self {
        let memory = vec![0; BLOCK + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN).min(ALIGN);
        Self { file, direct: set_direct(file, true).is_ok(), memory, start, filled: 0, at: 0 }
    }

    fn block(&mut self) -> &mut [u8] {
        let end = self.start + BLOCK;
        self.memory.get_mut(self.start..end).unwrap_or_default()
    }

    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let filled = self.filled;
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK - filled));
            if let Some(slot) = self.block().get_mut(filled..filled + now.len()) {
                slot.copy_from_slice(now);
            }
            self.filled += now.len();
            bytes = later;
            if self.filled == BLOCK {
                self.write()?;
            }
        }
        Ok(())
    }

    /// Writes the remaining bytes, padded to the next multiple of [`ALIGN`].
    fn finish(&mut self) -> io::Result<()> {
        let (filled, whole) = (self.filled, self.filled.next_multiple_of(ALIGN));
        if let Some(rest) = self.block().get_mut(filled..whole) {
            rest.fill(0);
        }
        self.filled = whole;
        self.write()
    }

    fn write(&mut self) -> io::Result<()> {
        let (file, at, filled) = (self.file, self.at, self.filled);
        let written = file.write_all_at(self.block().get(..filled).unwrap_or_default(), at);
        match written {
            // The file system accepts the flag, but not the write.
            Err(error) if self.direct && error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                set_direct(file, false)?;
                self.direct = false;
                return self.write();
            }
            written => written?,
        }
        (self.at, self.filled) = (at + filled as u64, 0);
        Ok(())
    }
}

fn set_direct(file: &File, direct: bool) -> rustix::io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    fcntl_setfl(file, flags)
}

#[cfg(test)]
mod tests {
    use super::super::modes::Sharing;
    use super::*;
    use object_store::ObjectStoreExt;

    fn payload(lens: &[usize]) -> (PutPayload, Vec<u8>) {
        let mut whole = Vec::new();
        let parts: Vec<Bytes> = lens
            .iter()
            .enumerate()
            .map(|(n, &len)| {
                let part: Vec<u8> =
                    (0..len).map(|i| u8::try_from((i * 31 + n * 7 + i / 4096) % 251).unwrap()).collect();
                whole.extend_from_slice(&part);
                part.into()
            })
            .collect();
        (parts.into_iter().collect(), whole)
    }

    fn store(root: &FilePath) -> Direct {
        let objects = LocalFileSystem::new_with_prefix(root).unwrap().with_fsync(true);
        Direct::new(objects, Home::of(root).unwrap(), root.to_owned(), Modes::of(Sharing::Private))
    }

    #[tokio::test]
    async fn what_is_written_is_read_whatever_its_length() {
        // A disk, where the checkout is on one, and memory, which may not take direct writes.
        for folder in [env!("CARGO_MANIFEST_DIR"), "/dev/shm"] {
            let Ok(dir) = tempfile::Builder::new().prefix("target-direct").tempdir_in(folder) else { continue };
            let store = store(dir.path());
            for (n, lens) in [
                vec![LARGE],
                vec![LARGE - 1, 2],
                vec![1, BLOCK, 4095, 3 * BLOCK + 17, 0, 5],
                vec![ALIGN; LARGE / ALIGN + 3],
            ]
            .into_iter()
            .enumerate()
            {
                let (payload, whole) = payload(&lens);
                let key = Path::from(format!("pack/{n}/object"));
                store.put(&key, payload.clone()).await.unwrap();
                assert!(store.get(&key).await.unwrap().bytes().await.unwrap() == whole, "{lens:?} in {folder}");
                store.put(&key, payload).await.unwrap();
                let names: Vec<_> = std::fs::read_dir(dir.path().join(format!("pack/{n}"))).unwrap().collect();
                assert_eq!(names.len(), 1, "nothing is left beside it");
            }
        }
    }

    #[tokio::test]
    async fn what_may_not_replace_anything_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let (payload, _) = payload(&[LARGE + 1]);
        let create = PutOptions::from(PutMode::Create);
        store.put_opts(&"a".into(), payload.clone(), create.clone()).await.unwrap();
        assert!(matches!(store.put_opts(&"a".into(), payload, create).await, Err(Error::AlreadyExists { .. })));
    }

    #[tokio::test]
    async fn nothing_is_written_or_read_where_the_directory_was() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let (store, key) = (store(&root), Path::from("log/1"));
        store.put(&key, "x".into()).await.unwrap();
        std::fs::rename(&root, dir.path().join("away")).unwrap();
        let gone = |error: &Error| matches!(error, Error::Generic { .. });
        assert!(gone(&store.put(&key, "y".into()).await.unwrap_err()));
        assert!(gone(&store.put(&Path::from("pack/1"), vec![1; LARGE].into()).await.unwrap_err()));
        assert!(gone(&store.get(&key).await.unwrap_err()), "it is not missing: it is away");
        assert!(gone(&store.list(None).try_collect::<Vec<_>>().await.unwrap_err()), "nor is there nothing");
        assert!(!root.exists());
        std::fs::rename(dir.path().join("away"), &root).unwrap();
        assert_eq!(store.get(&key).await.unwrap().bytes().await.unwrap(), "x");
    }

    #[tokio::test]
    async fn nothing_is_reached_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (root, other) = (dir.path().join("repo"), dir.path().join("other"));
        for folder in [&root, &other.join("s")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(other.join("s/mine"), "mine").unwrap();
        let store = store(&root);
        std::os::unix::fs::symlink(&other, root.join("pack")).unwrap();
        let (key, new) = (Path::from("pack/s/mine"), Path::from("pack/s/new"));
        for error in [
            store.get(&key).await.unwrap_err(),
            store.put(&new, "x".into()).await.unwrap_err(),
            store.delete(&key).await.unwrap_err(),
            store.list(Some(&Path::from("pack"))).try_collect::<Vec<_>>().await.unwrap_err(),
        ] {
            assert!(format!("{error:?}").contains("UnexpectedEntry"), "{error:?}");
        }
        assert_eq!(store.list(None).try_collect::<Vec<_>>().await.unwrap(), []);
        assert_eq!(std::fs::read(other.join("s/mine")).unwrap(), b"mine");
        assert!(!other.join("s/new").exists());
    }

    #[test]
    fn a_write_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (payload, _) = payload(&[LARGE]);
        // A folder is in the way of the rename.
        std::fs::create_dir_all(dir.path().join("taken/by/a/folder")).unwrap();
        put(&dir.path().join("taken"), &payload, Modes::of(Sharing::Private)).unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
