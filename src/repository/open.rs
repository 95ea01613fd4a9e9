//! Creating and opening a repository.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{OpenOptions, Repository, Shared, Unidentified, layout, log, objects};
use crate::budget::Budget;
use crate::clock::{Clock, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{Kind, open, seal};
use crate::format::wire::{Reader, Writer};
use crate::id::RepositoryId;
use crate::storage::{self, Effort, Location, Store, StoreOptions, probe};
use crate::tree::{check_own_folder, make_private_folder};

impl Repository {
    /// Creates a repository in `store`, or opens the existing one; the second value is true if it was created.
    ///
    /// # Errors
    /// Conflict, if it is a folder with other files; unsupported, with the reason and a remedy, if the store lacks an operation that concurrent writing needs.
    ///
    /// # Cancel safety
    /// Safe: one create makes the repository.
    pub async fn create(store: Store, options: OpenOptions) -> Result<(Self, bool)> {
        let key = layout::repository();
        if let Some(object) = objects::get(&**store.objects(), Kind::Repository, &key).await? {
            return Ok((Self::assemble(store, options, read_id(&object)?, Arc::new(SystemClock))?, false));
        }
        if let Some(folder) = store.directory() {
            check_for_others(folder)?;
        }
        if !store.is_local() {
            probe(&store, Effort::Quick).await?.shared_writing()?;
        }
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let mut body = Writer::new();
        body.bytes(&RepositoryId::random().to_bytes()).signed(clock.now().0).count(0);
        let object = seal(Kind::Repository, &body.into_bytes(), false);
        let answer = objects::retry(|| objects::create(&**store.objects(), &key, object.clone())).await?;
        let found = objects::get_required(&**store.objects(), Kind::Repository, &key).await?;
        let made = answer != objects::Created::Exists && found == object;
        store.keep_reserve().await;
        Ok((Self::assemble(store, options, read_id(&found)?, clock)?, made))
    }

    /// Opens the repository in `store`.
    ///
    /// # Errors
    /// Not found, if there is none.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn open(store: Store, options: OpenOptions) -> Result<Self> {
        Self::open_at(store, options, Arc::new(SystemClock)).await
    }

    /// Opens the repository at `location`.
    ///
    /// # Errors
    /// Not found, if there is none, or not even a store; else as [`storage::open`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn at(location: &Location, how: &StoreOptions, options: OpenOptions) -> Result<Self> {
        let opened = storage::open_and(location, how, async |store| Ok(Self::open(store.clone(), options).await));
        let repository = opened.await.map_err(|error| match error.kind() {
            ErrorKind::NotFound => no_repository(location).source(error),
            _ => error,
        })??;
        tracing::info!(%location, id = %repository.id(), "opened the repository");
        Ok(repository)
    }

    /// Opens the repository at `location`; none if there is none.
    ///
    /// # Errors
    /// Not found, if this user had one in this folder: its disk may not be mounted.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn at_if_any(location: &Location, how: &StoreOptions, options: OpenOptions) -> Result<Option<Self>> {
        let how = StoreOptions { create: false, ..how.clone() };
        let cache = options.cache.clone();
        match Self::at(location, &how, options).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if was_used_before(location, cache) {
                    return Err(Error::not_found("the repository was here, and is gone").at(location).help(format!(
                        "if it is on a disk that is not mounted, mount it; `towline init {location}` makes a new, empty one"
                    )));
                }
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }

    /// Opens the repository at `location`, or creates it; the second value is true if it was created.
    ///
    /// # Errors
    /// As [`Repository::at_if_any`] and [`Repository::create`].
    ///
    /// # Cancel safety
    /// Safe: one create makes the repository.
    pub async fn at_or_create(location: &Location, how: &StoreOptions, options: OpenOptions) -> Result<(Self, bool)> {
        if let Some(repository) = Self::at_if_any(location, how, options.clone()).await? {
            repository.remember();
            return Ok((repository, false));
        }
        let how = StoreOptions { create: true, ..how.clone() };
        let (repository, created) = Self::create(storage::open(location, &how).await?, options).await?;
        tracing::info!(%location, id = %repository.id(), created, "opened the repository");
        repository.remember();
        Ok((repository, created))
    }

    /// Makes the cache folder, by which [`was_used_before`] knows a repository on a disk.
    fn remember(&self) {
        if self.store().directory().is_some()
            && let Err(error) = make_private_folder(&self.shared.cache)
        {
            tracing::debug!("the repository will not be known if its disk is gone: {error}");
        }
    }

    /// Opens with the given clock, for recorded times and grace periods.
    ///
    /// # Errors
    /// As [`Repository::open`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn open_at(store: Store, options: OpenOptions, clock: Arc<dyn Clock>) -> Result<Self> {
        let Some(object) = objects::get(&**store.objects(), Kind::Repository, &layout::repository()).await? else {
            return Err(no_repository(store.location()));
        };
        Self::assemble(store, options, read_id(&object)?, clock)
    }

    /// Reads the description of the repository again, and compares it.
    ///
    /// # Errors
    /// Damaged or not found, if it is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn audit_description(&self) -> Result<()> {
        let key = layout::repository();
        let object = objects::get_required(&**self.store().objects(), Kind::Repository, &key).await?;
        let found = read_id(&object)?;
        if found == self.id() {
            return Ok(());
        }
        Err(Error::damaged("repository was replaced by another one").at(key).expected(self.id()).got(found))
    }

    /// Name of this repository's folder in the spool: its id, and a digest of its location without the endpoint, so that pending
    /// checkpoints can be uploaded through another endpoint of the bucket.
    #[must_use]
    pub fn spool_name(&self) -> String {
        name_at(self.id(), &self.store().location().to_string())
    }

    fn assemble(store: Store, options: OpenOptions, id: RepositoryId, clock: Arc<dyn Clock>) -> Result<Self> {
        let budget = Budget::new(options.memory.unwrap_or_else(Budget::default_bytes))?;
        let cache = match options.cache {
            Some(cache) => cache,
            None => default_cache()?,
        };
        let cache = cache.join(name_at(id, &store.address()));
        let log = log::Log::new(Arc::clone(store.objects()), Arc::clone(&clock), budget.clone()).of(id);
        let (uncached, log_reads, segments, footers, policy) = Default::default();
        let guard = options.guard.unwrap_or_else(|| Arc::new(Unidentified));
        let shared = Arc::new(Shared {
            id,
            store,
            log,
            log_reads,
            clock,
            budget,
            cache,
            uncached,
            segments,
            footers,
            guard,
            policy,
        });
        Ok(Self { shared, source: None, caller: None })
    }
}

/// Refuses a folder for a new repository that holds something else: its files would lie among those of the repository.
fn check_for_others(folder: &Path) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    // An unfinished file of another creator is `NAME#N`; a disk of its own has `lost+found`.
    let is_own = |name: &str| layout::is_own(name.split('#').next().unwrap_or(name));
    let mut others: Vec<String> =
        names.filter(|name| !name.starts_with('.') && name != "lost+found" && !is_own(name)).collect();
    others.sort_unstable();
    let Some(first) = others.first() else { return Ok(()) };
    let more = if others.len() > 1 { format!(" and {} more", others.len() - 1) } else { String::new() };
    Err(Error::conflict("folder for the new repository holds other files")
        .at(folder.display())
        .expected("an empty or a new folder")
        .got(format!("{first}{more}"))
        .help(format!("name a folder of its own, such as {}", folder.join("repository").display())))
}

/// Error: `location` holds no repository.
fn no_repository(location: &Location) -> Error {
    let check = match location {
        Location::Directory(_) => "check the path, and that its disk is mounted",
        _ => "check bucket and prefix",
    };
    let error = Error::not_found("there is no repository")
        .at(location)
        .help(format!("{check}; `towline init {location}` makes a new one"));
    // For example, a mount point whose disk is not mounted.
    let is_empty = |folder: &Path| std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    match location {
        Location::Directory(folder) if is_empty(folder) => error.got("an empty folder: is its disk mounted?"),
        _ => error,
    }
}

/// Reads the description: id (16), time of creation (signed), features: count, each a string. No feature is defined yet.
pub(super) fn read_id(object: &bytes::Bytes) -> Result<RepositoryId> {
    let body = open(Kind::Repository, object).map_err(|error| error.at(layout::repository()))?;
    let mut reader = Reader::new(&body);
    let id = RepositoryId::from_bytes(reader.array()?);
    reader.signed()?;
    if reader.count(1)? > 0 {
        let feature = reader.text(256)?.to_owned();
        return Err(Error::unsupported("repository uses a feature that this program does not know")
            .got(feature)
            .help("use a newer towline"));
    }
    reader.finish()?;
    Ok(id)
}

/// Name of a local folder for the repository `id` at `address`: the id, and a digest of the address. A copy elsewhere may have
/// the same id but other content, and must not share the cache.
fn name_at(id: RepositoryId, address: &str) -> String {
    format!("{id}{}", digest_of(address))
}

/// End of the names of local folders for repositories at `address`.
fn digest_of(address: &str) -> String {
    format!("-{}", &blake3::hash(address.as_bytes()).to_hex()[..16])
}

/// True if `cache`, by default this user's, has files of a repository in the folder at `location`.
fn was_used_before(location: &Location, cache: Option<PathBuf>) -> bool {
    let Location::Directory(path) = location else { return false };
    let Ok(cache) = cache.map_or_else(default_cache, Ok) else { return false };
    // The address of a store has no links; the end of the path may be gone.
    let real = path.ancestors().find_map(|above| {
        let rest = path.strip_prefix(above).ok()?;
        above.canonicalize().ok().map(|real| real.join(rest))
    });
    let address = Location::Directory(real.unwrap_or_else(|| path.clone())).to_string();
    let end = digest_of(&address);
    let entries = std::fs::read_dir(cache).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().ends_with(&end))
}

/// `$XDG_CACHE_HOME/towline`, else `~/.cache/towline`
/// (<https://specifications.freedesktop.org/basedir-spec/latest/>), else a folder of this user among the temporary files.
///
/// # Errors
/// Denied, if somebody else may use it.
pub(crate) fn default_cache() -> Result<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || folder("HOME").map(|home| home.join(".cache"));
    match folder("XDG_CACHE_HOME").or_else(home) {
        Some(folder) => own_cache(folder.join("towline")),
        None => temporary_cache(&std::env::temp_dir()),
    }
}

/// `folder`, unless others can replace what is in it. One that does not exist yet will be this user's.
fn own_cache(folder: PathBuf) -> Result<PathBuf> {
    match check_own_folder(&folder) {
        Err(error) if error.kind() == ErrorKind::Denied && folder.exists() => {
            Err(error.help("change its mode, or set XDG_CACHE_HOME to a folder of your own"))
        }
        _ => Ok(folder),
    }
}

/// Cache folder below `temporary`, where another user may have created a folder of the same name.
fn temporary_cache(temporary: &Path) -> Result<PathBuf> {
    let folder = temporary.join(format!("towline-{}", rustix::process::geteuid().as_raw()));
    make_private_folder(&folder).map_err(|error| error.help("remove it, or set XDG_CACHE_HOME or HOME"))?;
    Ok(folder.join("cache"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::storage::{Location, StoreOptions, open};

    #[test]
    fn a_new_repository_lies_among_no_other_files() {
        let folder = tempfile::tempdir().unwrap();
        for own in ["repository#1", "log", "pack#12", ".hidden", "lost+found"] {
            std::fs::write(folder.path().join(own), "").unwrap();
        }
        check_for_others(folder.path()).unwrap();
        for other in ["model.bin", "ckpt", "repository.txt"] {
            std::fs::write(folder.path().join(other), "").unwrap();
        }
        let error = check_for_others(folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.to_string().contains("got ckpt and 2 more"), "{error}");
    }

    #[tokio::test]
    async fn a_missing_repository_is_named_once() {
        let top = tempfile::tempdir().unwrap();
        let asked = ": got an empty folder: is its disk mounted?";
        for (path, asked, causes) in [(top.path().to_owned(), asked, 0), (top.path().join("none"), "", 1)] {
            let location = Location::directory(path).unwrap();
            let opened = Repository::at(&location, &StoreOptions::default(), OpenOptions::default()).await;
            let error = opened.err().unwrap();
            assert_eq!(error.to_string(), format!("there is no repository at {location}{asked}"));
            let help = error.help_text().unwrap();
            assert!(help.contains("disk is mounted") && help.contains(&format!("`towline init {location}`")), "{help}");
            let source = std::error::Error::source(&error).map(ToString::to_string);
            assert_eq!(source.iter().count(), causes, "{source:?}");
            assert!(!source.unwrap_or_default().contains("there is no repository"));
        }
    }

    #[tokio::test]
    async fn a_copy_with_the_same_id_has_a_cache_of_its_own() {
        let top = tempfile::tempdir().unwrap();
        let options = || OpenOptions { cache: Some(top.path().join("cache")), ..OpenOptions::default() };
        let store = async |name: &str| {
            let location = Location::directory(top.path().join(name)).unwrap();
            open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap()
        };
        let (one, _) = Repository::create(store("one").await, options()).await.unwrap();
        let copy = store("copy").await;
        std::fs::copy(top.path().join("one/repository"), top.path().join("copy/repository")).unwrap();
        let copy = Repository::open(copy, options()).await.unwrap();
        assert_eq!(copy.id(), one.id());
        assert_ne!(copy.cache(), one.cache());
        let again = Repository::open(store("one").await, options()).await.unwrap();
        assert_eq!(again.cache(), one.cache());
    }

    #[test]
    fn a_cache_among_the_temporary_files_is_of_this_user_alone() {
        let temporary = tempfile::tempdir().unwrap();
        let cache = temporary_cache(temporary.path()).unwrap();
        let own = cache.parent().unwrap().to_owned();
        assert!(own.ends_with(format!("towline-{}", rustix::process::geteuid().as_raw())));
        std::fs::remove_dir(&own).unwrap();
        symlink("/somewhere/else", &own).unwrap();
        assert!(temporary_cache(temporary.path()).is_err(), "planted before");
    }
}
