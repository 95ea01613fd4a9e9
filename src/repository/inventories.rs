//! Inventories: small objects in which agents tell what their caches hold. Their contents belong to `format`, their signatures to
//! `transfer`.
//!
//! They are not part of the saved state: no commit names them, and a collect ignores them.

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::{ObjectStoreExt as _, PutPayload};

use super::listing::listing;
use super::{Repository, layout, objects};
use crate::error::Result;
use crate::format::envelope::{Kind, seal};
use crate::identity::Identity;

/// Maximum number of agents whose inventories are read.
const AGENTS_MAX: usize = 4096;

/// Inventory in the store, by its head.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StoredInventory {
    /// The agent that its key names.
    pub agent: Identity,
    /// Length, entity tag and time by which the store tells its versions apart.
    pub version: String,
}

impl Repository {
    /// Writes the head of `identity`'s inventory in place of the one before.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it is one write.
    pub async fn put_inventory(&self, identity: &Identity, body: &[u8]) -> Result<()> {
        self.put_object(&layout::inventory_head(identity), seal(Kind::Inventory, body, true)).await
    }

    /// Writes the set `set` that inventories of `identity` are based on, in one of its two slots.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it is one write.
    pub async fn put_inventory_set(&self, identity: &Identity, set: &str, slot: bool, body: &[u8]) -> Result<()> {
        self.put_object(&layout::inventory_set(identity, set, slot), seal(Kind::KeySet, body, false)).await
    }

    pub(super) async fn put_object(&self, key: &object_store::path::Path, object: Bytes) -> Result<()> {
        let put = || async { Ok(self.store().objects().put(key, PutPayload::from_bytes(object.clone())).await?) };
        objects::retry(put).await.map(drop)
    }

    /// Inventories of agents, in their order, of those whose site is `wanted`; and whether there are more than are read.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn stored_inventories(
        &self,
        wanted: impl Fn(&str) -> bool + Send,
    ) -> Result<(Vec<StoredInventory>, bool)> {
        let agents = listing(&**self.store().objects(), &layout::inventories(), |meta| {
            let agent = layout::inventory_agent(&meta.location).filter(|agent| wanted(agent.site()))?;
            let version = format!("{} {:?} {}", meta.size, meta.e_tag, meta.last_modified);
            Some(StoredInventory { agent, version })
        });
        let mut agents: Vec<StoredInventory> = agents.take(AGENTS_MAX + 1).try_collect().await?;
        let more = agents.len() > AGENTS_MAX;
        agents.truncate(AGENTS_MAX);
        agents.sort();
        Ok((agents, more))
    }

    /// Body of the head of `identity`'s inventory; none if it has none. It counts in the memory budget only while it is read.
    ///
    /// # Errors
    /// Damaged; exhausted; denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn inventory(&self, identity: &Identity) -> Result<Option<Bytes>> {
        let key = layout::inventory_head(identity);
        objects::body(&**self.store().objects(), self.budget(), Kind::Inventory, &key).await
    }

    /// Body of the set `set` that inventories of `identity` are based on, in one of its two slots.
    ///
    /// # Errors
    /// Not found; damaged; exhausted; denied or unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn inventory_set(&self, identity: &Identity, set: &str, slot: bool) -> Result<Bytes> {
        let key = layout::inventory_set(identity, set, slot);
        objects::body_required(&**self.store().objects(), self.budget(), Kind::KeySet, &key).await
    }
}
