//! Sites file and price book, read again when one of them changes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use crate::placement::{PriceBook, SITES_LEN_MAX, Sites};
use crate::tree::{FileStamp, read_text_file};

/// Paths of a sites file, and of a price book whose entries replace those that ship with the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SitesPaths {
    /// Sites file.
    pub sites: PathBuf,
    /// Price book, if there is one.
    pub prices: Option<PathBuf>,
}

/// Sites and prices, as their files have them.
#[derive(Debug)]
pub struct SitesRead {
    /// Sites and links.
    pub sites: Sites,
    /// Prices.
    pub book: PriceBook,
    /// Hash of both files.
    pub hash: blake3::Hash,
}

/// Files of an advisor.
#[derive(Debug)]
pub(super) struct SitesFiles {
    paths: SitesPaths,
    state: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    stamps: [FileStamp; 2],
    read: Arc<SitesRead>,
    /// Reason why `read` is not what the files have now.
    problem: Option<String>,
}

impl SitesPaths {
    /// Reads both files.
    ///
    /// # Errors
    /// Usage, with file and line; not found, or errors of the file system.
    pub fn read(&self) -> Result<SitesRead> {
        let (mut book, mut hasher) = (PriceBook::built_in(), blake3::Hasher::new());
        if let Some(file) = &self.prices {
            let text = read_text_file(file, SITES_LEN_MAX)?;
            hasher.update(text.as_bytes());
            book = book.overridden_by(PriceBook::read(&text).map_err(|error| error.in_file(file))?);
        }
        let text = read_text_file(&self.sites, SITES_LEN_MAX)
            .map_err(|error| error.help("docs/placement.md has an example; --sites names another file"))?;
        hasher.update(book.dated().as_bytes()).update(text.as_bytes());
        let sites = Sites::read(&text, &book).map_err(|error| error.in_file(&self.sites))?;
        Ok(SitesRead { sites, book, hash: hasher.finalize() })
    }

    fn stamps(&self) -> [FileStamp; 2] {
        [FileStamp::at(&self.sites), self.prices.as_deref().map(FileStamp::at).unwrap_or_default()]
    }
}

impl SitesFiles {
    /// Reads `paths`.
    ///
    /// # Errors
    /// As [`SitesPaths::read`].
    pub(super) fn open(paths: SitesPaths) -> Result<Self> {
        let (stamps, read) = (paths.stamps(), Arc::new(paths.read()?));
        Ok(Self { paths, state: Mutex::new(Loaded { stamps, read, problem: None }) })
    }

    /// Sites and prices, and the reason why they are not what the files have now. Reads files that have changed.
    pub(super) fn current(&self) -> (Arc<SitesRead>, Option<String>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let stamps = self.paths.stamps();
        if stamps != state.stamps {
            match self.paths.read() {
                Ok(read) => {
                    state.read = Arc::new(read);
                    state.problem = None;
                }
                Err(error) => {
                    let problem = format!("sites file cannot be used, so the one before holds: {error}");
                    tracing::warn!("{problem}: {error:?}");
                    state.problem = Some(problem);
                }
            }
            // A file that changes while it is read has another stamp the next time.
            state.stamps = stamps;
        }
        (Arc::clone(&state.read), state.problem.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_again_and_a_bad_one_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let sites = folder.path().join("sites.toml");
        std::fs::write(&sites, "[[site]]\nname = 'home'\n").unwrap();
        let files = SitesFiles::open(SitesPaths { sites: sites.clone(), prices: None }).unwrap();
        let (first, problem) = files.current();
        assert!(first.sites.site("home").is_some() && problem.is_none());
        std::fs::write(&sites, "[[site]]\nname = 'home'\n[[site]]\nname = 'cloud'\n").unwrap();
        let (second, problem) = files.current();
        assert!(second.sites.site("cloud").is_some() && problem.is_none() && first.hash != second.hash);
        std::fs::write(&sites, "[[site]]\nname = 'home'\ncolour = 'red'\n").unwrap();
        let (third, problem) = files.current();
        assert!(Arc::ptr_eq(&second, &third), "the one before holds");
        assert!(problem.unwrap().contains("colour"));
        std::fs::remove_file(&sites).unwrap();
        assert!(files.current().1.is_some());
        std::fs::write(&sites, "[[site]]\nname = 'moon'\n").unwrap();
        assert!(files.current().0.sites.site("moon").is_some());
    }
}
