//! Pack footers: the chunks of a pack, with full ids. They are immutable, so they are cached, up to a limit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Repository;
use super::layout::{self, Family};
use super::objects;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{FooterEntry, PackFooter, PackRef, TRAILER_LEN};
use crate::id::PackId;

/// Maximum number of chunks in cached footers: about 64 MiB.
const KEPT_MAX: usize = 1 << 20;

/// Footers read so far.
#[derive(Debug, Default)]
pub(super) struct Footers(Mutex<FooterCache>);

#[derive(Debug, Default)]
struct FooterCache {
    by_pack: HashMap<PackId, Arc<PackFooter>>,
    chunks: usize,
}

impl Footers {
    fn get(&self, pack: PackId) -> Option<Arc<PackFooter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).by_pack.get(&pack).cloned()
    }

    fn keep(&self, pack: PackId, footer: &Arc<PackFooter>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.chunks + footer.entries.len() > KEPT_MAX {
            *kept = FooterCache::default();
        }
        kept.chunks += footer.entries.len();
        kept.by_pack.insert(pack, Arc::clone(footer));
    }
}

impl Repository {
    /// The footer of `pack`, in one ranged read.
    ///
    /// # Errors
    /// Damaged, if the footer is; not found, if the pack is gone.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn footer(&self, pack: &PackRef) -> Result<Arc<PackFooter>> {
        if let Some(kept) = self.shared.footers.get(pack.id) {
            return Ok(kept);
        }
        let footer = Arc::new(self.footer_uncached(pack).await?);
        self.shared.footers.keep(pack.id, &footer);
        Ok(footer)
    }

    /// The footer, always read from the store.
    ///
    /// # Errors
    /// As [`Repository::footer`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn footer_uncached(&self, pack: &PackRef) -> Result<PackFooter> {
        let key = layout::owned(Family::Pack, pack.id);
        let tail_len = u64::from(pack.footer_len) + TRAILER_LEN;
        let start = pack.len.checked_sub(tail_len).ok_or_else(|| {
            Error::damaged("pack is shorter than its footer").at(&key).expected(tail_len).got(pack.len)
        })?;
        let decoded = u64::from(pack.chunks) * size_of::<FooterEntry>() as u64;
        let _charge = self.budget().charge(tail_len + decoded).await.map_err(|error| error.at(&key))?;
        let mut tail = vec![0; usize::try_from(tail_len).unwrap_or(usize::MAX)];
        let objects = &**self.store().objects();
        let len = match objects::read_range(objects, &key, start, &mut tail).await {
            // Stores answer a range beyond the end in different ways.
            Err(error) if matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Damaged) => {
                match objects::len(objects, &key).await {
                    Ok(len) if len != pack.len => len,
                    Ok(_) => return Err(error),
                    Err(other) => return Err(other),
                }
            }
            read => read?,
        };
        if len != pack.len {
            return Err(Error::damaged("pack has another length").at(key).expected(pack.len).got(len));
        }
        let footer = PackFooter::decode(&tail, pack.len).map_err(|error| error.at(&key))?;
        if footer.entries.len() == pack.chunks as usize {
            return Ok(footer);
        }
        Err(Error::damaged("pack holds another number of chunks")
            .at(key)
            .expected(pack.chunks)
            .got(footer.entries.len()))
    }
}
