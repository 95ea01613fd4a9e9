//! Inventories of other agents: read from the repository, verified, and kept for as long as they do not change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::{StreamExt as _, stream};

use super::identity::{Context, Credentials, Signature, Trusted};
use crate::budget::Retained;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    BaseSet, ChangedSet, INVENTORY_SETS, Inventory, InventoryHead, KeySet, LinkRate, SignedBytes, decode_base,
};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::repository::{Repository, StoredInventory};
use crate::work::blocking;

/// Inventories read at once.
const READS: usize = 8;

/// Time after which an inventory that cannot be used is read again, though it has not changed.
const REFUSED_FOR: Duration = Duration::from_mins(1);

/// Inventories of one repository.
#[derive(Debug, Default)]
pub struct Inventories {
    known: Mutex<BTreeMap<Identity, Known>>,
    refused: Mutex<BTreeMap<Identity, Refused>>,
}

/// An inventory that could not be used: whoever may write to the store must not make every reader read it all the time.
#[derive(Clone, Debug)]
struct Refused {
    version: String,
    at: Instant,
    error: Arc<Error>,
}

/// Last inventory of one agent.
#[derive(Clone, Debug)]
struct Known {
    /// BLAKE3 of the body of its head.
    digest: blake3::Hash,
    sets: [Arc<StoredSet>; 3],
    inventory: Arc<Counted>,
}

/// A set that inventories are based on.
#[derive(Debug)]
struct StoredSet {
    base: Option<BaseSet>,
    set: KeySet,
    _kept: Retained,
}

/// An inventory whose memory is counted.
#[derive(Debug)]
pub struct Counted {
    inventory: Inventory,
    _kept: Retained,
}

impl std::ops::Deref for Counted {
    type Target = Inventory;

    fn deref(&self) -> &Inventory {
        &self.inventory
    }
}

/// An agent whose inventory cannot be used.
#[derive(Debug)]
pub struct UnusableInventory {
    /// The agent that its key names.
    pub agent: Identity,
    /// Reason.
    pub error: Error,
}

/// Inventories at one moment.
#[derive(Debug, Default)]
pub struct InventoriesRead {
    /// Usable ones, by agent.
    pub inventories: Vec<Arc<Counted>>,
    /// The others.
    pub unusable: Vec<UnusableInventory>,
    /// True if there are more agents than are read.
    pub more: bool,
}

impl InventoriesRead {
    /// Hash of `before` and of the inventories.
    #[must_use]
    pub fn hash(&self, before: blake3::Hash) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(before.as_bytes());
        for counted in &self.inventories {
            hasher.update(counted.agent.path().as_bytes()).update(&counted.sequence.to_le_bytes());
        }
        hasher.finalize()
    }
}

impl Inventories {
    /// Reads the inventories of agents whose site is `wanted`, if they have changed since the last call. Only those whose signatures `trusted` confirms are used; one
    /// that is older than the last one of its agent is refused.
    ///
    /// # Errors
    /// Denied or unreachable, as the store says. An inventory that cannot be read or verified is no error: it is in the result.
    ///
    /// # Cancel safety
    /// Safe: what was read is kept.
    pub async fn read(
        &self,
        repository: &Repository,
        trusted: &Trusted,
        wanted: impl Fn(&str) -> bool + Send,
    ) -> Result<InventoriesRead> {
        let (stored, more) = repository.stored_inventories(wanted).await?;
        let agents: BTreeSet<Identity> = stored.iter().map(|stored| stored.agent.clone()).collect();
        self.lock().retain(|agent, _| agents.contains(agent));
        self.refused().retain(|agent, _| agents.contains(agent));
        let read = stream::iter(stored).map(|StoredInventory { agent, version }| async move {
            if let Some(error) = self.refused_before(&agent, &version) {
                return (agent, Err(error));
            }
            let known = self.lock().get(&agent).cloned();
            let read = read_one(repository, trusted, &agent, known).await;
            let read = read.map_err(|error| self.refuse(&agent, version, error));
            (agent, read)
        });
        let mut all: Vec<_> = read.buffer_unordered(READS).collect().await;
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut found = InventoriesRead { more, ..InventoriesRead::default() };
        for (agent, read) in all {
            match read {
                Ok(Some(known)) => {
                    found.inventories.push(Arc::clone(&known.inventory));
                    self.lock().insert(agent, known);
                }
                // It was withdrawn meanwhile.
                Ok(None) => {}
                Err(error) => found.unusable.push(UnusableInventory { agent, error }),
            }
        }
        Ok(found)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Identity, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self) -> std::sync::MutexGuard<'_, BTreeMap<Identity, Refused>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Error of this version of an inventory, if it was read lately.
    fn refused_before(&self, agent: &Identity, version: &str) -> Option<Error> {
        let refused = self.refused().get(agent).cloned()?;
        (refused.version == version && refused.at.elapsed() < REFUSED_FOR).then(|| Error::shared(&refused.error))
    }

    /// Remembers that this version of an inventory cannot be used, unless the store did not answer; returns the error.
    fn refuse(&self, agent: &Identity, version: String, error: Error) -> Error {
        if error.kind() == ErrorKind::Unreachable {
            return error;
        }
        let error = Arc::new(error);
        let shared = Error::shared(&error);
        self.refused().insert(agent.clone(), Refused { version, at: Instant::now(), error });
        shared
    }
}

/// Links that the inventory of this agent tells, which it may have published before a restart; none if it has none that can be used.
///
/// # Errors
/// Denied or unreachable, as the store says.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn published_links(repository: &Repository, credentials: &Credentials) -> Result<Vec<LinkRate>> {
    let agent = credentials.identity();
    let Some(body) = repository.inventory(&agent).await? else { return Ok(Vec::new()) };
    let (trusted, id, now) = (credentials.trusted(), repository.id(), repository.clock().now());
    let memory = repository.budget().kept_max() / READS as u64;
    let head = blocking(move || verified(&body, (&trusted, now), &agent, id, memory)).await;
    Ok(head.map(|head| head.links).unwrap_or_default())
}

async fn read_one(
    repository: &Repository,
    trusted: &Trusted,
    agent: &Identity,
    known: Option<Known>,
) -> Result<Option<Known>> {
    let Some(body) = repository.inventory(agent).await? else { return Ok(None) };
    let digest = blake3::hash(&body);
    if let Some(known) = known.as_ref().filter(|known| known.digest == digest) {
        return Ok(Some(known.clone()));
    }
    let head = {
        let (agent, trusted, id) = (agent.clone(), trusted.clone(), repository.id());
        // All that are read at once share the memory.
        let memory = repository.budget().kept_max() / READS as u64;
        let now = repository.clock().now();
        blocking(move || verified(&body, (&trusted, now), &agent, id, memory)).await?
    };
    if let Some(known) = &known
        && head.sequence <= known.inventory.sequence
    {
        return Err(Error::conflict("inventory is older than one that was read before")
            .at(agent)
            .expected(format!("a sequence number above {}", known.inventory.sequence))
            .got(head.sequence));
    }
    let (mut sets, mut own) = (Vec::with_capacity(3), 0);
    for (place, (set, changed)) in
        INVENTORY_SETS.into_iter().zip([&head.held, &head.pinned, &head.promised]).enumerate()
    {
        let known = known.as_ref().map(|known| &known.sets[place]).filter(|set| set.base == changed.base);
        let set = match known {
            Some(known) => Arc::clone(known),
            None => Arc::new(stored_set(repository, agent, (set, changed.base), own).await?),
        };
        own += set.set.weight();
        sets.push(set);
    }
    let sets: [Arc<StoredSet>; 3] =
        sets.try_into().map_err(|_| Error::other("an inventory has three sets, and another number was read"))?;
    let (agent, budget, of) = (agent.clone(), repository.budget().clone(), sets.clone());
    let inventory = blocking(move || {
        let [held, pinned, promised] = of;
        let patched = |set: &StoredSet, changed: &ChangedSet| set.set.patched(&changed.patch);
        let inventory = Inventory {
            held: patched(&held, &head.held)?,
            pinned: patched(&pinned, &head.pinned)?,
            promised: patched(&promised, &head.promised)?,
            agent,
            sequence: head.sequence,
            at: head.at,
            space: head.space,
            links: head.links,
        };
        let weight = [&inventory.held, &inventory.pinned, &inventory.promised].iter().map(|set| set.weight()).sum();
        Ok(Counted { _kept: budget.keep_published(inventory.agent.path(), own, weight)?, inventory })
    });
    Ok(Some(Known { digest, sets, inventory: Arc::new(inventory.await?) }))
}

/// The head in `body`, if `agent` signed it for the repository `id`, with a certificate that was valid then and is now.
fn verified(
    body: &[u8],
    (trusted, now): (&Trusted, Timestamp),
    agent: &Identity,
    id: RepositoryId,
    memory: u64,
) -> Result<InventoryHead> {
    let signed = SignedBytes::decode(body)?;
    let signature = Signature::decode(&signed.signature)?;
    let at = InventoryHead::time(&signed.bytes)?;
    trusted.verify(&signature, Context::Inventory, &signed.bytes, now)?;
    let signer = trusted.verify(&signature, Context::Inventory, &signed.bytes, at)?;
    if signer.agent()? != agent {
        return Err(Error::denied("inventory was signed by another agent").expected(agent).got(signer.agent()?));
    }
    let head = InventoryHead::decode(&signed.bytes, memory)?;
    if head.repository != id {
        return Err(Error::denied("inventory is of another repository").expected(id).got(head.repository));
    }
    Ok(head)
}

/// A set of an agent whose other sets take `own` bytes.
async fn stored_set(
    repository: &Repository,
    agent: &Identity,
    (set, base): (&str, Option<BaseSet>),
    own: u64,
) -> Result<StoredSet> {
    let set = match base {
        None => KeySet::default(),
        Some(base) => {
            let body = repository.inventory_set(agent, set, base.slot).await?;
            let memory = repository.budget().kept_max() / READS as u64;
            blocking(move || decode_base(&body, &base.digest, memory)).await?
        }
    };
    let kept = repository.budget().keep_published(agent.path(), own, set.weight())?;
    Ok(StoredSet { base, _kept: kept, set })
}
