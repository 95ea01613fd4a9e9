//! Store in a directory: objects are files, written durably.
//!
//! All is done from the open root, and follows no link: see [`root`]. Objects are staged and published as [`staging`] says.

mod blocks;
mod home;
mod list;
mod modes;
mod open;
mod reserve;
mod root;
mod staged;
mod staging;
mod trial;

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream, TryStreamExt as _};
use object_store::path::Path;
use object_store::{
    Attributes, CopyMode, CopyOptions, Error, Extensions, GetOptions, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    RenameOptions, Result, UploadPart,
};

use self::home::Home;
pub(crate) use self::home::{enclosing_repository, open_object};
use self::modes::Modes;
pub use self::modes::Sharing;
pub(super) use self::open::open_directory;
pub(crate) use self::reserve::RESERVE;
use self::root::Root;
use self::staged::StagedObject;
pub use self::staging::{StagingFile, staging_files};
pub(crate) use self::trial::{DirectoryTrial, try_directory};

/// Objects that are deleted at the same time.
const DELETES: usize = 10;

/// Store in a directory.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    home: Home,
    modes: Modes,
}

impl Directory {
    /// Creates it at `home`; files and folders get `modes`.
    fn new(home: Home, modes: Modes) -> Self {
        Self { home, modes }
    }

    /// Result of `work` in the open root.
    async fn within<T: Send + 'static>(
        &self,
        key: &Path,
        work: impl FnOnce(&Root) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let (home, at) = (self.home.clone(), key.clone());
        blocking(key.clone(), move || work(&home.open()?).map_err(|error| home.located(&at, error))).await
    }

    /// Writes an object. It is not acknowledged if the root is another one by then.
    fn write(&self, key: &Path, payload: &PutPayload, replace: bool) -> io::Result<PutResult> {
        let mut object = StagedObject::create(self.home.open()?.make_place(key, self.modes)?, self.modes)?;
        object.write(payload)?;
        let put = object.publish(replace)?;
        self.home.open()?;
        Ok(put)
    }

    fn unsupported(&self, operation: &str) -> Error {
        Error::NotImplemented { operation: operation.to_owned(), implementer: self.to_string() }
    }
}

impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.home.path().display())
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for Directory {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let replace = match opts.mode {
            PutMode::Overwrite => true,
            PutMode::Create => false,
            PutMode::Update(_) => return Err(self.unsupported("put of an object with a given version")),
        };
        if !opts.attributes.is_empty() {
            return Err(self.unsupported("put of an object with attributes"));
        }
        let (store, key) = (self.clone(), location.clone());
        let write = move || store.write(&key, &payload, replace).map_err(|error| store.home.located(&key, error));
        blocking(location.clone(), write).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        if !opts.attributes.is_empty() {
            return Err(self.unsupported("put of an object with attributes"));
        }
        let (modes, key) = (self.modes, location.clone());
        let object =
            self.within(location, move |root| StagedObject::create(root.make_place(&key, modes)?, modes)).await?;
        Ok(Box::new(Upload { object: Some(Arc::new(object)), home: self.home.clone(), key: location.clone(), len: 0 }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let key = location.clone();
        let read = move |root: &Root| {
            let (file, path) = root.object(&key)?;
            let stat = rustix::fs::fstat(&file)?;
            Ok((list::object_meta(key, &stat), file, path))
        };
        let (meta, file, path) = self.within(location, read).await?;
        options.check_preconditions(&meta)?;
        let range = match options.range {
            Some(range) => range.as_range(meta.size).map_err(|source| generic(io::Error::other(source)))?,
            None => 0..meta.size,
        };
        let payload = GetResultPayload::File(file, path);
        Ok(GetResult { payload, meta, range, attributes: Attributes::default(), extensions: Extensions::default() })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let (key, ranges) = (location.clone(), ranges.to_vec());
        let read = move |root: &Root| {
            let (file, _) = root.object(&key)?;
            ranges.into_iter().map(|range| read_range(&file, range)).collect()
        };
        self.within(location, read).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |location: Result<Path>| {
            let store = store.clone();
            async move {
                let location = location?;
                let key = location.clone();
                store.within(&location, move |root| root.place(&key)?.remove()).await?;
                Ok(location)
            }
        };
        locations.map(delete).buffered(DELETES).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (home, prefix) = (self.home.clone(), prefix.cloned().unwrap_or_default());
        let open = async move {
            let opened = home.clone();
            let root = blocking(prefix.clone(), move || opened.open()).await?;
            Ok::<_, Error>(list::list(home, root, prefix))
        };
        stream::once(open).try_flatten().boxed()
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        let offset = offset.clone();
        self.list(prefix).try_filter(move |meta| std::future::ready(meta.location > offset)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.cloned().unwrap_or_default();
        self.within(&prefix.clone(), move |root| list::list_folder(root, &prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let mode = match options.mode {
            CopyMode::Overwrite => PutMode::Overwrite,
            CopyMode::Create => PutMode::Create,
        };
        let bytes = self.get_opts(from, GetOptions::default()).await?.bytes().await?;
        self.put_opts(to, bytes.into(), mode.into()).await.map(drop)
    }

    async fn rename_opts(&self, _: &Path, _: &Path, _: RenameOptions) -> Result<()> {
        Err(self.unsupported("rename"))
    }
}

/// Multipart upload. Dropped before it is complete, it leaves nothing.
#[derive(Debug)]
struct Upload {
    object: Option<Arc<StagedObject>>,
    home: Home,
    key: Path,
    /// Bytes of the parts so far.
    len: u64,
}

impl Upload {
    fn ended(&self) -> Error {
        generic(io::Error::other(format!("the upload of {} has ended", self.key)))
    }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let at = self.len;
        self.len += data.content_length() as u64;
        let (object, ended, key) = (self.object.clone(), self.ended(), self.key.clone());
        Box::pin(async move {
            let object = object.ok_or(ended)?;
            blocking(key, move || object.write_part(&data, at)).await
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let object = self.object.take().and_then(Arc::into_inner).ok_or_else(|| self.ended())?;
        let home = self.home.clone();
        let publish = move || {
            let put = object.publish(true)?;
            home.open()?;
            Ok(put)
        };
        blocking(self.key.clone(), publish).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.object = None;
        Ok(())
    }
}

fn read_range(file: &File, range: Range<u64>) -> io::Result<Bytes> {
    let end = range.end.min(file.metadata()?.len());
    let len = end.checked_sub(range.start).filter(|len| *len > 0).ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes.into())
}

/// Result of blocking `work` on the object `key`.
async fn blocking<T: Send + 'static>(key: Path, work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|stopped| Err(io::Error::other(stopped))).map_err(|error| failed(&key, error))
}

fn failed(key: &Path, error: io::Error) -> Error {
    let path = key.to_string();
    match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path, source: Box::new(error) },
        io::ErrorKind::AlreadyExists => Error::AlreadyExists { path, source: Box::new(error) },
        _ => generic(error),
    }
}

/// An error without a class of its own; one of Towline stays what it is.
fn generic(source: io::Error) -> Error {
    match source.downcast::<crate::Error>() {
        Ok(own) => Error::Generic { store: "directory", source: Box::new(own) },
        Err(source) => Error::Generic { store: "directory", source: Box::new(source) },
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path as FilePath;
    use std::sync::atomic::{AtomicBool, Ordering};

    use object_store::ObjectStoreExt as _;
    use rustix::fs::{CWD, Mode, RenameFlags, mkfifoat, renameat_with};

    use super::blocks::{ALIGN, BLOCK};
    use super::modes::Sharing;
    use super::staged::LARGE;
    use super::*;
    use crate::error::ErrorKind;

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

    fn store(root: &FilePath) -> Directory {
        Directory::new(Home::of(root).unwrap(), Modes::of(Sharing::Private))
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
        let error = crate::Error::from(store.get(&key).await.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Damaged, "{error:?}");
        for error in [
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

    /// Another writer of a shared repository may put anything there: it is damage of one object, not of the store.
    #[tokio::test]
    async fn what_is_no_file_is_a_damaged_object_and_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let pack = dir.path().join("pack");
        std::fs::create_dir_all(pack.join("folder")).unwrap();
        std::fs::write(pack.join("file"), "content").unwrap();
        mkfifoat(CWD, pack.join("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(pack.join("socket")).unwrap();
        std::os::unix::fs::symlink("file", pack.join("link")).unwrap();
        for name in ["pipe", "socket", "link", "file/below", "pipe/below", "link/below"] {
            let key = Path::from(format!("pack/{name}"));
            let ranges = std::slice::from_ref(&(0..4));
            for error in [store.get(&key).await.map(drop), store.get_ranges(&key, ranges).await.map(drop)] {
                let error = crate::Error::from(error.unwrap_err());
                assert_eq!((error.kind(), error.place()), (ErrorKind::Damaged, Some(key.as_ref())), "{error:?}");
            }
            assert_eq!(open_object(dir.path(), &key).unwrap_err().kind(), ErrorKind::Damaged);
        }
        assert!(matches!(store.get(&"pack/folder".into()).await.unwrap_err(), Error::NotFound { .. }));
    }

    /// F6: "not followed, also if another writer puts one in the place of a folder meanwhile".
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nothing_is_reached_through_a_link_that_comes_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let (root, other) = (dir.path().join("repo"), dir.path().join("other"));
        std::fs::create_dir_all(root.join("pack")).unwrap();
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("object"), "mine").unwrap();
        std::os::unix::fs::symlink(&other, root.join("link")).unwrap();
        let stopped = Arc::new(AtomicBool::new(false));
        let exchanging = std::thread::spawn({
            let (stopped, link, pack) = (Arc::clone(&stopped), root.join("link"), root.join("pack"));
            move || {
                while !stopped.load(Ordering::Relaxed) {
                    renameat_with(CWD, &link, CWD, &pack, RenameFlags::EXCHANGE).unwrap();
                }
            }
        });
        let (store, key) = (store(&root), Path::from("pack/object"));
        let mut done = [0; 4];
        for _ in 0..2000 {
            done[0] += u32::from(store.put(&key, "theirs".into()).await.is_ok());
            done[1] +=
                u32::from(store.put_opts(&"pack/new".into(), "theirs".into(), PutMode::Create.into()).await.is_ok());
            if let Ok(got) = store.get(&key).await {
                assert_eq!(got.bytes().await.unwrap(), "theirs");
                done[2] += 1;
            }
            let listed: Vec<_> = store.list(Some(&"pack".into())).filter_map(async |meta| meta.ok()).collect().await;
            assert!(listed.iter().all(|meta| meta.size == 6), "{listed:?}");
            assert!(
                staging_files(&root, |_| true).unwrap().iter().all(|file| file.path.starts_with(root.join("pack")))
            );
            done[3] += u32::from(store.delete(&key).await.is_ok() | store.delete(&"pack/new".into()).await.is_ok());
        }
        stopped.store(true, Ordering::Relaxed);
        exchanging.join().unwrap();
        assert!(done.iter().all(|count| (1..2000).contains(count)), "{done:?} went through: no race");
        assert_eq!(std::fs::read(other.join("object")).unwrap(), b"mine");
        assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_write_that_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        // A folder is in the way of the rename.
        std::fs::create_dir_all(dir.path().join("taken/by/a/folder")).unwrap();
        for len in [1, LARGE] {
            store.put(&"taken".into(), payload(&[len]).0).await.unwrap_err();
        }
        let mut upload = store.put_multipart(&"dropped".into()).await.unwrap();
        upload.put_part("part".into()).await.unwrap();
        assert_eq!(staging_files(dir.path(), |_| true).unwrap().len(), 1);
        upload.abort().await.unwrap();
        upload.complete().await.unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn parts_may_come_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let (store, key) = (store(dir.path()), Path::from("pack/object"));
        let mut upload = store.put_multipart(&key).await.unwrap();
        let (first, second) = (upload.put_part("first, ".into()), upload.put_part("second".into()));
        second.await.unwrap();
        assert!(matches!(store.get(&key).await.unwrap_err(), Error::NotFound { .. }));
        first.await.unwrap();
        upload.complete().await.unwrap();
        assert_eq!(store.get(&key).await.unwrap().bytes().await.unwrap(), "first, second");
        assert_eq!(store.get_range(&key, 7..99).await.unwrap(), "second");
        assert_eq!(store.get_ranges(&key, &[0..5, 7..13]).await.unwrap(), ["first", "second"]);
    }

    #[tokio::test]
    async fn listings_have_objects_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        for key in ["a", "log/1", "log/2", "pack/s/p"] {
            store.put(&key.into(), key.into()).await.unwrap();
        }
        for other in ["log/3#1", "log/bad\nname", "log/2~"] {
            std::fs::write(dir.path().join(other), "x").unwrap();
        }
        std::os::unix::fs::symlink("1", dir.path().join("log/link")).unwrap();
        let deep = dir.path().join(["d"; 100].join("/"));
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("object#1"), "x").unwrap();
        assert_eq!(staging_files(dir.path(), |_| true).unwrap().len(), 1, "log/3#1");
        let keys = |listed: Vec<ObjectMeta>| {
            let mut keys: Vec<_> = listed.into_iter().map(|meta| meta.location.to_string()).collect();
            keys.sort();
            keys
        };
        let all: Vec<_> = store.list(None).try_collect().await.unwrap();
        assert_eq!(keys(all), ["a", "log/1", "log/2", "log/2~", "pack/s/p"]);
        let later: Vec<_> = store.list_with_offset(Some(&"log".into()), &"log/1".into()).try_collect().await.unwrap();
        assert_eq!(keys(later), ["log/2", "log/2~"]);
        assert_eq!(store.list(Some(&"none".into())).try_collect::<Vec<_>>().await.unwrap(), []);
        let top = store.list_with_delimiter(None).await.unwrap();
        assert_eq!(keys(top.objects), ["a"]);
        assert_eq!(top.common_prefixes.len(), 3);
        assert!(matches!(store.delete(&"log/9".into()).await.unwrap_err(), Error::NotFound { .. }));
        assert!(matches!(store.get(&"pack/s".into()).await.unwrap_err(), Error::NotFound { .. }));
    }
}
