//! Heads of audit logs: one small object each, created once, in the order of time. Their contents belong to `audit`.
//!
//! They are not part of the saved state: no commit names them, and a collect ignores them.

use bytes::Bytes;
use futures::StreamExt as _;
use object_store::ObjectMeta;
use object_store::path::Path;

use super::listing::listed;
use super::{Repository, layout, objects};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, open, seal};
use crate::identity::Identity;

/// Maximum number of numbers to try: an object with the number may exist.
const TRIES: u64 = 16;
/// Objects read at once.
const READS: usize = 16;

impl Repository {
    /// Creates the object of a head of `identity`'s audit log, for the time `at`.
    ///
    /// # Errors
    /// Conflict, if the numbers from that time on are taken; denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it was created or not.
    pub async fn put_audit_head(&self, identity: &Identity, at: Timestamp, body: &[u8]) -> Result<()> {
        let object = seal(Kind::AuditHead, body, false);
        let first = u64::try_from(at.0).unwrap_or(0);
        for number in first..first.saturating_add(TRIES) {
            let key = layout::audit_head(identity, number);
            let created = objects::create(&**self.store().objects(), &key, object.clone()).await?;
            if created == objects::Created::Yes {
                return Ok(());
            }
            // An existing object may be from this very request.
            let found = objects::get(&**self.store().objects(), Kind::AuditHead, &key).await;
            if found.is_ok_and(|found| found.is_some_and(|found| found == object)) {
                return Ok(());
            }
            if created == objects::Created::Unknown {
                return Err(Error::unreachable("store did not accept the head of an audit log").at(key));
            }
        }
        Err(Error::conflict("numbers for the head of an audit log are taken")
            .at(layout::audit_head(identity, first))
            .help("check who may write below audit/ in the repository"))
    }

    /// Passes the bodies of heads of `identity`'s audit logs to `each`, the oldest first; an error for an unreadable
    /// one. All of them, or the `newest` ones.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn audit_heads(
        &self,
        identity: &Identity,
        newest: Option<usize>,
        mut each: impl FnMut(Result<Bytes>),
    ) -> Result<()> {
        let prefix = layout::audit_heads(identity);
        let pick = |meta: ObjectMeta| layout::is_audit_head(&meta.location).then_some(meta.location);
        let heap = |key: &Path| key.as_ref().len();
        let (mut keys, _memory) = listed(&**self.store().objects(), self.budget(), &prefix, pick, heap).await?;
        keys.sort();
        keys.drain(..keys.len().saturating_sub(newest.unwrap_or(usize::MAX)));
        let read = futures::stream::iter(keys).map(|key| async move {
            let found = objects::get_required(&**self.store().objects(), Kind::AuditHead, &key).await;
            found
                .and_then(|object| open(Kind::AuditHead, &object))
                .map_err(|error| if error.place().is_none() { error.at(&key) } else { error })
        });
        let mut read = std::pin::pin!(read.buffered(READS));
        while let Some(body) = read.next().await {
            each(body);
        }
        Ok(())
    }
}
