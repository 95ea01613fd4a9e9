//! Inventories: what the cache of an agent holds, as it tells others.
//!
//! A *head* is small, is written again and again, and is signed by its agent. It names *bases*, larger objects that are written
//! once, and says how each set changed since its base.

use std::time::Duration;

use super::envelope::DIGEST_LEN;
use super::key_set::{KeySet, Patch};
use super::wire::{Read, Reader, Writer};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::limits::AGENT_NAME_LEN_MAX;

/// Version of the head. Version 1 has no outcomes of links.
const VERSION: u8 = 2;

/// Time without a new inventory after which an agent is taken to have ended: one that runs publishes every ten minutes, at least.
const ENDED_AFTER: Duration = Duration::from_hours(1);

/// Content of an agent's cache.
#[derive(Clone, Debug)]
pub struct Inventory {
    /// The agent, by its signature.
    pub agent: Identity,
    /// Rises with each inventory of the agent.
    pub sequence: u64,
    /// Time, by the agent's clock.
    pub at: Timestamp,
    /// Space of the cache.
    pub space: CacheSpace,
    /// Chunks in the cache.
    pub held: KeySet,
    /// Those of them that are pinned.
    pub pinned: KeySet,
    /// Pinned chunks that are not there yet.
    pub promised: KeySet,
    /// Measured links to the agent.
    pub links: Vec<LinkRate>,
}

/// Head of an inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InventoryHead {
    /// Repository whose chunks they are, and in which it lies.
    pub repository: RepositoryId,
    /// Rises with each head of the agent.
    pub sequence: u64,
    /// Time, by the agent's clock.
    pub at: Timestamp,
    /// Space of the cache.
    pub space: CacheSpace,
    /// Chunks in the cache.
    pub held: ChangedSet,
    /// Those of them that are pinned.
    pub pinned: ChangedSet,
    /// Pinned chunks that are not there yet.
    pub promised: ChangedSet,
    /// Measured links to the agent.
    pub links: Vec<LinkRate>,
}

/// Rate at which bytes come to an agent over a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkRate {
    /// Site that they come from; empty for the repository.
    pub site: String,
    /// Median, in bytes a second.
    pub rate: u64,
    /// Hundredths: the 90th percentile of the time over the median.
    pub spread: u32,
    /// Number of measurements.
    pub samples: u32,
    /// Milliseconds that a transfer takes beside the time of its bytes, at the median; 0: not known.
    pub overhead_ms: u32,
    /// Number of transfers whose time was held against the prediction.
    pub outcomes: u32,
    /// Thousandths: median of the relative errors of the predicted medians.
    pub error: u32,
    /// Number of those transfers that took at most the predicted 90th percentile.
    pub covered: u32,
}

/// Space of a cache, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSpace {
    /// All of it.
    pub capacity: u64,
    /// Used by chunks.
    pub used: u64,
    /// Promised to pins, whether their chunks are there or not.
    pub promised: u64,
}

/// A set, as the changes of one that was stored before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangedSet {
    /// The stored one; none: the empty set.
    pub base: Option<BaseSet>,
    /// Changes since.
    pub patch: Patch,
}

/// A stored set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseSet {
    /// Slot that it lies in: each set has two, written in turn, so that the head of before stays valid until the next is written.
    pub slot: bool,
    /// BLAKE3 of its body.
    pub digest: [u8; DIGEST_LEN],
}

/// The sets of an inventory, in the order of its head.
pub const INVENTORY_SETS: [&str; 3] = ["held", "pinned", "promised"];

impl Inventory {
    /// True if its agent is taken to run at the time `now`. Clocks differ, but one that is ahead by more is wrong, or the agent wants to
    /// be taken to run for ever.
    #[must_use]
    pub fn agent_runs(&self, now: Timestamp) -> bool {
        now.since(self.at) < ENDED_AFTER && self.at.since(now) < ENDED_AFTER
    }
}

impl InventoryHead {
    /// Its bytes, which the agent signs.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.u8(VERSION).bytes(&self.repository.to_bytes()).varint(self.sequence).signed(self.at.0);
        writer.varint(self.space.capacity).varint(self.space.used).varint(self.space.promised);
        for set in [&self.held, &self.pinned, &self.promised] {
            match &set.base {
                Some(base) => writer.u8(1 + u8::from(base.slot)).bytes(&base.digest),
                None => writer.u8(0),
            };
            set.patch.write(&mut writer);
        }
        writer.count(self.links.len());
        for LinkRate { site, rate, spread, samples, overhead_ms, outcomes, error, covered } in &self.links {
            writer.string(site.as_bytes()).varint(*rate);
            for number in [spread, samples, overhead_ms, outcomes, error, covered] {
                writer.varint((*number).into());
            }
        }
        writer.into_bytes()
    }

    /// Time in the bytes of a head, to verify its signature before the rest is decoded.
    ///
    /// # Errors
    /// Damaged; unsupported, for a later version.
    pub fn time(bytes: &[u8]) -> Result<Timestamp> {
        let mut reader = Reader::new(bytes);
        Self::read_version(&mut reader)?;
        let _repository: [u8; 16] = reader.array()?;
        reader.varint()?;
        Ok(Timestamp(reader.signed()?))
    }

    fn read_version(reader: &mut Reader<'_>) -> Result<u8> {
        let version = reader.u8()?;
        if !(1..=VERSION).contains(&version) {
            return Err(Error::unsupported("inventory was written by another version")
                .expected(VERSION)
                .got(version)
                .help("use the same version of towline everywhere"));
        }
        Ok(version)
    }

    /// Reads its bytes, within `memory` bytes of memory.
    ///
    /// # Errors
    /// Damaged; unsupported, for a later version; exhausted.
    pub fn decode(bytes: &[u8], memory: u64) -> Result<Self> {
        let mut reader = Reader::within(bytes, memory);
        let version = Self::read_version(&mut reader)?;
        let head = Self {
            repository: RepositoryId::from_bytes(reader.array()?),
            sequence: reader.varint()?,
            at: Timestamp(reader.signed()?),
            space: CacheSpace { capacity: reader.varint()?, used: reader.varint()?, promised: reader.varint()? },
            held: ChangedSet::read(&mut reader)?,
            pinned: ChangedSet::read(&mut reader)?,
            promised: ChangedSet::read(&mut reader)?,
            links: LinkRate::read_all(&mut reader, version)?,
        };
        reader.finish()?;
        Ok(head)
    }
}

impl LinkRate {
    fn read_all(reader: &mut Reader<'_>, version: u8) -> Read<Vec<Self>> {
        // Each has at least a length, a rate, a spread and a number.
        let count = reader.count(4)?;
        reader.kept_list(count, |reader| {
            let site = reader.kept_text(AGENT_NAME_LEN_MAX)?;
            let (rate, spread, samples) = (reader.varint()?, reader.varint32()?, reader.varint32()?);
            let mut of_outcomes = [0; 4];
            if version > 1 {
                for number in &mut of_outcomes {
                    *number = reader.varint32()?;
                }
            }
            let [overhead_ms, outcomes, error, covered] = of_outcomes;
            Ok(Self { site, rate, spread, samples, overhead_ms, outcomes, error, covered })
        })
    }
}

impl ChangedSet {
    fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let base = match reader.u8()? {
            0 => None,
            1 => Some(BaseSet { slot: false, digest: reader.array()? }),
            2 => Some(BaseSet { slot: true, digest: reader.array()? }),
            _ => return Err(reader.malformed("a set has two slots")),
        };
        Ok(Self { base, patch: Patch::read(reader)? })
    }
}

/// The body of a base: a set by itself.
#[must_use]
pub fn encode_base(set: &KeySet) -> Vec<u8> {
    let mut writer = Writer::new();
    set.write(&mut writer);
    writer.into_bytes()
}

/// Reads the body of a base, within `memory` bytes of memory.
///
/// # Errors
/// Damaged, if it is none, or not the one with `digest`; exhausted.
pub fn decode_base(body: &[u8], digest: &[u8; DIGEST_LEN], memory: u64) -> Result<KeySet> {
    if blake3::hash(body).as_bytes() != digest {
        return Err(Error::damaged("base of an inventory is not the one that its agent signed"));
    }
    let mut reader = Reader::within(body, memory);
    let set = KeySet::read(&mut reader)?;
    reader.finish()?;
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_of_the_far_future_is_not_taken_to_run() {
        let now = Timestamp(0).after(10 * ENDED_AFTER);
        let runs = |at: Timestamp| {
            let inventory = Inventory {
                agent: Identity::new("home", "a").unwrap(),
                sequence: 1,
                at,
                space: CacheSpace::default(),
                held: KeySet::default(),
                pinned: KeySet::default(),
                promised: KeySet::default(),
                links: Vec::new(),
            };
            inventory.agent_runs(now)
        };
        assert!(runs(now) && runs(now.after(ENDED_AFTER / 2)), "its clock is a little ahead");
        for at in [Timestamp(0), now.after(ENDED_AFTER), Timestamp(i64::MAX)] {
            assert!(!runs(at), "{at}");
        }
    }
}
