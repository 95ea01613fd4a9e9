//! Quotas of tenants: whose each chunk is, and which of its own chunks a tenant lets go of next. Pure.
//!
//! A chunk counts for one tenant, the one that it was inserted for, as long as it is in the cache; others may read it. A tenant's
//! unpinned chunks are in a queue (CLOCK): the oldest goes first, unless it was read since, then it goes round.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// Number of a tenant of this cache, from 1.
pub(crate) type TenantNumber = u16;

/// Keys in a queue above twice the chunks of the tenant; then those that are no longer there are dropped.
const STALE_MAX: usize = 1024;

/// Most bytes that chunks of tenants take in a cache. The default bounds nobody, and counts nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantQuotas {
    /// Quota of each tenant that is not listed.
    pub each: Option<u64>,
    /// Quotas of some tenants, by name.
    pub tenants: BTreeMap<String, u64>,
}

impl TenantQuotas {
    /// True if nobody has a quota.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.each.is_none() && self.tenants.is_empty()
    }

    /// Bytes that `tenant` may take, if it is bounded.
    #[must_use]
    pub fn of(&self, tenant: &str) -> Option<u64> {
        self.tenants.get(tenant).copied().or(self.each)
    }
}

/// The tenants of a cache.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    tenants: Vec<Tenant>,
    of: HashMap<u64, TenantNumber>,
}

#[derive(Debug)]
struct Tenant {
    name: String,
    /// Units that it may take; none: any.
    quota: Option<u64>,
    /// Units that it takes, including those being written.
    weight: u64,
    chunks: usize,
    /// Keys of its chunks, the next to go first. May have some that are gone, are pinned, or come twice.
    order: VecDeque<u64>,
}

impl Quotas {
    /// Adds a tenant; gives its number. None if there are too many.
    pub(crate) fn add(&mut self, name: String, quota: Option<u64>) -> Option<TenantNumber> {
        let number = TenantNumber::try_from(self.tenants.len() + 1).ok()?;
        self.tenants.push(Tenant { name, quota, weight: 0, chunks: 0, order: VecDeque::new() });
        Some(number)
    }

    /// The number of the tenant called `name`.
    pub(crate) fn number(&self, name: &str) -> Option<TenantNumber> {
        let at = self.tenants.iter().position(|tenant| tenant.name == name)?;
        TenantNumber::try_from(at + 1).ok()
    }

    /// Names, by number; with the units that each takes, and may take.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, u64, Option<u64>)> {
        self.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.weight, tenant.quota))
    }

    /// Chunks that count for somebody.
    pub(crate) fn len(&self) -> u64 {
        self.of.len() as u64
    }

    /// The tenant that the chunk of `key` counts for.
    pub(crate) fn holder(&self, key: u64) -> Option<TenantNumber> {
        self.of.get(&key).copied()
    }

    /// Units beyond the quota of `tenant`, if it takes `weight` more.
    pub(crate) fn excess(&self, tenant: TenantNumber, weight: u16) -> u64 {
        let Some(tenant) = self.at(tenant) else { return 0 };
        tenant.quota.map_or(0, |quota| (tenant.weight + u64::from(weight)).saturating_sub(quota))
    }

    /// Counts units for `tenant` that are being written.
    pub(crate) fn reserve(&mut self, tenant: TenantNumber, weight: u16) {
        if let Some(tenant) = self.at_mut(tenant) {
            tenant.weight += u64::from(weight);
        }
    }

    /// Counts them no longer.
    pub(crate) fn release(&mut self, tenant: TenantNumber, weight: u16) {
        if let Some(tenant) = self.at_mut(tenant) {
            tenant.weight = tenant.weight.saturating_sub(u64::from(weight));
        }
    }

    /// Counts the chunk of `key` for `tenant`. False if there is no such tenant, or it counts for somebody.
    pub(crate) fn charge(&mut self, key: u64, tenant: TenantNumber, weight: u16) -> bool {
        if self.at(tenant).is_none() || self.of.contains_key(&key) {
            return false;
        }
        self.of.insert(key, tenant);
        self.reserve(tenant, weight);
        if let Some(tenant) = self.at_mut(tenant) {
            tenant.chunks += 1;
        }
        self.queue(key, tenant);
        true
    }

    /// The chunk of `key` is gone.
    pub(crate) fn discharge(&mut self, key: u64, weight: u16) {
        let Some(number) = self.of.remove(&key) else { return };
        self.release(number, weight);
        if let Some(tenant) = self.at_mut(number) {
            tenant.chunks -= 1;
        }
    }

    /// Puts a chunk of `tenant` at the end of its queue.
    pub(crate) fn queue(&mut self, key: u64, tenant: TenantNumber) {
        let Self { tenants, of } = self;
        let Some(found) = usize::from(tenant).checked_sub(1).and_then(|at| tenants.get_mut(at)) else { return };
        found.order.push_back(key);
        if found.order.len() > 2 * found.chunks + STALE_MAX {
            let mut seen = HashSet::with_capacity(found.chunks);
            found.order.retain(|key| of.get(key) == Some(&tenant) && seen.insert(*key));
        }
    }

    /// Takes the next chunk of `tenant` out of its queue.
    pub(crate) fn next(&mut self, tenant: TenantNumber) -> Option<u64> {
        loop {
            let key = self.at_mut(tenant)?.order.pop_front()?;
            if self.of.get(&key) == Some(&tenant) {
                return Some(key);
            }
        }
    }

    fn at(&self, tenant: TenantNumber) -> Option<&Tenant> {
        self.tenants.get(usize::from(tenant).checked_sub(1)?)
    }

    fn at_mut(&mut self, tenant: TenantNumber) -> Option<&mut Tenant> {
        self.tenants.get_mut(usize::from(tenant).checked_sub(1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_count_once_and_queues_stay_short() {
        let mut quotas = Quotas::default();
        let a = quotas.add("a".into(), Some(100)).unwrap();
        let b = quotas.add("b".into(), None).unwrap();
        assert_eq!((quotas.number("b"), quotas.number("c")), (Some(b), None));
        assert!(quotas.charge(7, a, 60) && !quotas.charge(7, b, 60) && !quotas.charge(8, 9, 1));
        assert_eq!(
            (quotas.holder(7), quotas.excess(a, 40), quotas.excess(a, 41), quotas.excess(b, 60)),
            (Some(a), 0, 1, 0)
        );
        quotas.discharge(7, 60);
        assert_eq!((quotas.next(a), quotas.len(), quotas.excess(a, 100)), (None, 0, 0));
        for key in 0..100_000 {
            assert!(quotas.charge(key, b, 1));
            quotas.discharge(key, 1);
        }
        assert!(quotas.tenants[1].order.len() <= STALE_MAX + 1);
        assert!(quotas.charge(5, b, 1));
        (0..5000).for_each(|_| quotas.queue(5, b));
        assert!(quotas.tenants[1].order.len() <= STALE_MAX + 3);
        assert_eq!(quotas.next(b), Some(5));
    }
}
