//! Presence of agents: each running agent announces its address in one small object, and rewrites it regularly.
//!
//! Only peer discovery uses it: a certificate proves the identity of the agent at an address, and a stopped agent does not
//! answer. So there is no conditional write, and no rule about clocks except that old announcements are ignored.

use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use object_store::{ObjectStoreExt as _, PutPayload};

use super::{Repository, layout, objects};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, open, seal};
use crate::format::wire::{Reader, Writer};
use crate::identity::Identity;
use crate::log_limit::LogLimit;

/// Maximum bytes of an address.
const ADDRESS_LEN_MAX: usize = 256;
/// Maximum number of agents that are read.
const AGENTS_MAX: usize = 1024;
/// Log lines about objects that no agent wrote.
static UNREADABLE: LogLimit = LogLimit::new();
/// Objects read at once.
const READS: usize = 16;

/// Announcement of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announced {
    /// Address `HOST:PORT` at which it listens.
    pub address: String,
    /// Time of the announcement, by the agent's clock.
    pub at: Timestamp,
}

impl Repository {
    /// Announces that the agent `agent` of `site` listens at `address`; to be repeated regularly.
    ///
    /// # Errors
    /// Usage, for an address that is too long; denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it is one write.
    pub async fn announce(&self, identity: &Identity, address: &str) -> Result<()> {
        if address.len() > ADDRESS_LEN_MAX {
            return Err(Error::usage("address is too long").expected(format!("at most {ADDRESS_LEN_MAX} bytes")));
        }
        let mut body = Writer::new();
        body.signed(self.clock().now().0).string(address.as_bytes());
        let object = seal(Kind::Agent, &body.into_bytes(), false);
        let key = layout::agent(identity.site(), identity.agent());
        let put = || async { Ok(self.store().objects().put(&key, PutPayload::from_bytes(object.clone())).await?) };
        objects::retry(put).await.map(drop)
    }

    /// Withdraws the announcement.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn withdraw(&self, identity: &Identity) -> Result<()> {
        Ok(self.store().objects().delete(&layout::agent(identity.site(), identity.agent())).await?)
    }

    /// Announcements of the last `age`. Unreadable ones are ignored, and those from as far in the future, which would never be old.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn announced(&self, age: Duration) -> Result<Vec<Announced>> {
        let prefix = layout::agents();
        let keys: Vec<_> = self.store().objects().list(Some(&prefix)).take(AGENTS_MAX).try_collect().await?;
        let read = futures::stream::iter(keys).map(|meta| async move {
            // The listing has the length, so an object that no agent wrote costs no request.
            let fits = objects::checked_len(Kind::Agent, &meta.location, meta.size);
            let object = match fits {
                Ok(_) => objects::get(&**self.store().objects(), Kind::Agent, &meta.location).await,
                Err(error) => Err(error),
            };
            let read = object.and_then(|object| object.as_ref().map(decode).transpose());
            read.map_err(|error| (meta.location, error))
        });
        let all: Vec<_> = read.buffer_unordered(READS).collect().await;
        let unreadable = all.iter().filter(|read| read.is_err()).count();
        if let Some(Err((key, error))) = all.iter().find(|read| read.is_err())
            && let Some(kept_back) = UNREADABLE.may()
        {
            tracing::warn!(%key, unreadable, kept_back, "agents cannot be read, this one first: {error:?}");
        }
        let (now, age) = (self.clock().now().0, i64::try_from(age.as_nanos()).unwrap_or(i64::MAX));
        let is_recent =
            |announced: &Announced| (now.saturating_sub(age)..=now.saturating_add(age)).contains(&announced.at.0);
        Ok(all.into_iter().filter_map(|read| read.ok()?).filter(is_recent).collect())
    }
}

fn decode(object: &bytes::Bytes) -> Result<Announced> {
    let body = open(Kind::Agent, object)?;
    let mut reader = Reader::new(&body);
    let (at, address) = (Timestamp(reader.signed()?), reader.text(ADDRESS_LEN_MAX)?.to_owned());
    reader.finish()?;
    Ok(Announced { address, at })
}
