//! Ledger of pinned chunks: number of pins and size of each. Pure.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Pin;
use crate::clock::Timestamp;
use crate::id::PinId;

/// A pinned chunk.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    pins: u32,
    /// Units that it uses, or will use.
    weight: u16,
}

/// All pins of a cache.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pins: BTreeMap<PinId, (Pin, Arc<[u64]>)>,
    wanted: HashMap<u64, Wanted>,
    weight: u64,
}

impl Ledger {
    /// True if the chunk of `key` is pinned.
    pub(crate) fn wants(&self, key: u64) -> bool {
        self.wanted.contains_key(&key)
    }

    /// Changes the expiry of a pin, and returns the pin, if there is one.
    pub(crate) fn renew(&mut self, id: PinId, expires: Option<Timestamp>) -> Option<&Pin> {
        let (pin, _) = self.pins.get_mut(&id)?;
        pin.expires = expires;
        Some(pin)
    }

    /// Space of all pinned chunks, present or expected, in units.
    pub(crate) fn weight(&self) -> u64 {
        self.weight
    }

    /// Space that pinning these chunks would add, in units.
    pub(crate) fn added_by(&self, chunks: &[(u64, u16)]) -> u64 {
        chunks.iter().filter(|(key, _)| !self.wants(*key)).map(|(_, weight)| u64::from(*weight)).sum()
    }

    /// Adds a pin.
    pub(crate) fn add(&mut self, pin: Pin, chunks: &[(u64, u16)]) {
        for &(key, weight) in chunks {
            let wanted = self.wanted.entry(key).or_insert(Wanted { pins: 0, weight });
            if wanted.pins == 0 {
                self.weight += u64::from(weight);
            }
            wanted.pins += 1;
        }
        self.pins.insert(pin.id, (pin, chunks.iter().map(|(key, _)| *key).collect()));
    }

    /// Removes a pin; returns the keys of chunks without any pin left. None if there is no such pin.
    pub(crate) fn remove(&mut self, id: PinId) -> Option<Vec<u64>> {
        let (_, keys) = self.pins.remove(&id)?;
        let mut free = Vec::new();
        for &key in &*keys {
            let Some(wanted) = self.wanted.get_mut(&key) else { continue };
            wanted.pins -= 1;
            if wanted.pins == 0 {
                self.weight -= u64::from(wanted.weight);
                self.wanted.remove(&key);
                free.push(key);
            }
        }
        Some(free)
    }

    /// Records the real size of a pinned chunk that was inserted.
    pub(crate) fn arrived(&mut self, key: u64, weight: u16) {
        if let Some(wanted) = self.wanted.get_mut(&key) {
            self.weight = self.weight + u64::from(weight) - u64::from(wanted.weight);
            wanted.weight = weight;
        }
    }

    /// Pins of owners whose names begin with `owners`, and the chunks that they list.
    pub(crate) fn listed_by(&self, owners: &str) -> (usize, u64) {
        let theirs = self.pins.values().filter(|(pin, _)| pin.owner.starts_with(owners));
        theirs.fold((0, 0), |(pins, chunks), (_, held)| (pins + 1, chunks + held.len() as u64))
    }

    /// Keys of the chunks of each pin of owners whose names begin with `owners`.
    pub(crate) fn lists_of(&self, owners: &str) -> Vec<Arc<[u64]>> {
        let theirs = self.pins.values().filter(|(pin, _)| pin.owner.starts_with(owners));
        theirs.map(|(_, keys)| Arc::clone(keys)).collect()
    }

    /// Units of a chunk, if it is pinned.
    pub(crate) fn weight_of(&self, key: u64) -> Option<u16> {
        self.wanted.get(&key).map(|wanted| wanted.weight)
    }

    /// Expired pins.
    pub(crate) fn expired(&self, now: Timestamp) -> Vec<PinId> {
        let over = self.pins.values().filter(|(pin, _)| pin.expires.is_some_and(|at| at <= now));
        over.map(|(pin, _)| pin.id).collect()
    }

    /// Every pin.
    pub(crate) fn pins(&self) -> impl Iterator<Item = &Pin> {
        self.pins.values().map(|(pin, _)| pin)
    }

    /// Keys of a pin's chunks.
    pub(crate) fn keys(&self, id: PinId) -> Option<&[u64]> {
        self.pins.get(&id).map(|(_, keys)| &**keys)
    }
}
