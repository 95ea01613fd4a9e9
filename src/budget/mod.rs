//! One memory budget for the process: every buffer holds a permit, and freed buffers are used again.
//!
//! Never wait for a permit while holding one of another kind: each stage takes the memory that it needs in one step, and releases
//! it without waiting. So there is always a stage that can continue.

mod callers;
mod growing;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::callers::CallerPools;
pub use self::growing::GrowingMemory;
use self::growing::Limit;
use crate::blocks::Memory;
use crate::error::{Error, Result};
use crate::limits::{KIB, MEMORY_MIN, MIB};

/// Permits are counted in units of this many bytes.
const UNIT: u64 = 4 * KIB;
/// Part of what [`Budget::keep_published`] counts that is of one agent, at most: what it has, and the next version of that beside it,
/// leave as much to others.
const PUBLISHED_PART: u64 = 4;
/// Structures that [`Budget::keep`] counts, in errors.
const PLANS: &str = "plans and marks";
/// Buffers smaller than this are not worth keeping.
const REUSE_MIN: usize = 256 << 10;

/// Limit of the bytes that the process holds in buffers. Clones share it.
#[derive(Clone)]
pub struct Budget(Arc<Shared>);

struct Shared {
    total: u64,
    permits: Arc<Semaphore>,
    /// As large as the budget: see [`Budget::charge`].
    structures: Arc<Semaphore>,
    /// Half of the budget: see [`Budget::keep`].
    kept: Arc<Semaphore>,
    /// Half of the budget: see [`Budget::keep_state`].
    states: Arc<Semaphore>,
    /// Half of the budget: see [`Budget::keep_published`].
    published: Arc<Semaphore>,
    /// Half of the budget: see [`Budget::carve_beside_buffers`].
    beside: Arc<Semaphore>,
    /// Half of the budget: see [`Budget::tree_memory`].
    trees: Arc<Semaphore>,
    /// Half of `trees`, for callers with limited rights.
    trees_of_callers: CallerPools,
    /// A quarter of the budget: see [`Budget::carve_for_caller`].
    beside_of_callers: CallerPools,
    pool: Mutex<Pool>,
    /// Its share of the parent budget.
    _carved: Vec<OwnedSemaphorePermit>,
}

#[derive(Default)]
struct Pool {
    free: Vec<(Memory, OwnedSemaphorePermit)>,
    waiting: usize,
}

impl Budget {
    /// A budget of `bytes`.
    ///
    /// # Errors
    /// Usage, if that is less than [`MEMORY_MIN`].
    pub fn new(bytes: u64) -> Result<Self> {
        if bytes < MEMORY_MIN {
            return Err(Error::usage("memory budget is too small")
                .expected(format!("at least {} MiB", MEMORY_MIN / MIB))
                .got(format!("{} MiB", bytes / MIB))
                .help("raise --memory"));
        }
        let units = usize::try_from(bytes / UNIT).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Ok(Self::of(bytes, units, Vec::new()))
    }

    fn of(total: u64, units: usize, carved: Vec<OwnedSemaphorePermit>) -> Self {
        let semaphore = |units| Arc::new(Semaphore::new(units));
        let (permits, structures) = (semaphore(units), semaphore(units));
        let [kept, states, published, beside, trees] = [units / 2; 5].map(semaphore);
        let (trees_of_callers, beside_of_callers) = (CallerPools::new(units / 4), CallerPools::new(units / 4));
        Self(Arc::new(Shared {
            total,
            permits,
            structures,
            kept,
            states,
            published,
            beside,
            trees,
            trees_of_callers,
            beside_of_callers,
            pool: Mutex::default(),
            _carved: carved,
        }))
    }

    /// A quarter of the cgroup's limit, or of the machine's memory if there is none; at most 2 GiB, because more does not make it
    /// faster.
    #[must_use]
    pub fn default_bytes() -> u64 {
        (Self::memory_bytes() / 4).clamp(MEMORY_MIN, 2048 * MIB)
    }

    /// Limit of the cgroup, or the machine's memory where it sets none, in bytes.
    #[must_use]
    pub fn memory_bytes() -> u64 {
        let machine = rustix::system::sysinfo();
        let memory = machine.totalram as u64 * u64::from(machine.mem_unit.max(1));
        cgroup_limit().unwrap_or(u64::MAX).min(memory)
    }

    /// All of it, in bytes.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.total
    }

    /// A buffer of `len` bytes with arbitrary contents, once the budget has that much free.
    ///
    /// # Errors
    /// Exhausted, if `len` can never fit.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub async fn buffer(&self, len: usize) -> Result<Buffer> {
        if let Some(found) = self.take_free(len) {
            return Ok(found);
        }
        let permit = self.acquire(self.units(len)?).await?;
        Ok(Buffer { bytes: Memory::new(len), len, permit: Some(permit), home: Arc::clone(&self.0) })
    }

    /// A separate budget with `bytes` of this one, which gets them back when the last buffer and clone of it are dropped. For a
    /// stage that needs buffers while tasks that hold buffers wait for it.
    ///
    /// # Errors
    /// Exhausted, if `bytes` can never fit.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub async fn carve(&self, bytes: u64) -> Result<Self> {
        let units = self.units(saturating_len(bytes))?;
        let carved = self.acquire(units).await?;
        Ok(Self::of(u64::from(units) * UNIT, units as usize, vec![carved]))
    }

    /// As [`Budget::carve`], for work that also takes buffers of this budget while it holds the other. All such budgets together take
    /// at most half of this one, so that buffers are left for each. The caller must hold no buffer.
    ///
    /// # Errors
    /// Exhausted, if `bytes` are more than half of the budget.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub async fn carve_beside_buffers(&self, bytes: u64) -> Result<Self> {
        if bytes > self.total() / 2 {
            return Err(Error::exhausted("work takes more than half of the memory budget")
                .expected(format!("at most {} MiB", self.total() / 2 / MIB))
                .got(format!("{} MiB", bytes.div_ceil(MIB)))
                .help("raise --memory"));
        }
        let units = self.units(saturating_len(bytes))?;
        let turn = Arc::clone(&self.0.beside).acquire_many_owned(units).await;
        let turn = turn.map_err(|_| Error::other("memory budget was closed"))?;
        let carved = self.acquire(units).await?;
        Ok(Self::of(u64::from(units) * UNIT, units as usize, vec![carved, turn]))
    }

    /// Reserves `bytes` for a structure while it is read and decoded: manifests, maps, the log. All structures that are read at
    /// one time fit the budget together. A holder of buffers may be waiting for the structure, so this waits only for other
    /// structures, whose readers wait only for the store; memory for buffers is taken only as far as it is free.
    ///
    /// # Errors
    /// Exhausted, if `bytes` can never fit.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub async fn charge(&self, bytes: u64) -> Result<Charge> {
        let units = self.units(saturating_len(bytes))?;
        let structure = Arc::clone(&self.0.structures).acquire_many_owned(units).await;
        let structure = structure.map_err(|_| Error::other("memory budget was closed"))?;
        let take = || Arc::clone(&self.0.permits).try_acquire_many_owned(units).ok();
        let buffers = take().or_else(|| {
            // Buffers that wait for their next use.
            self.0.lock().free.clear();
            take()
        });
        Ok(Charge { _structure: structure, _buffers: buffers })
    }

    /// Bytes of all structures that [`Budget::keep`] counts at one time, at most: half of the budget.
    #[must_use]
    pub fn kept_max(&self) -> u64 {
        self.0.total / 2
    }

    /// Counts `bytes` of a structure of any lifetime, such as the plan of a read or the marks of a collect. It never waits, because the
    /// holder of one structure may request another, and takes no memory from buffers, which the holder needs to continue.
    ///
    /// # Errors
    /// Exhausted, if all structures kept together would take more than [`Budget::kept_max`].
    pub fn keep(&self, bytes: u64) -> Result<Retained> {
        self.keep_in(&self.0.kept, PLANS, bytes)
    }

    /// Memory, none yet, of a structure that grows and counts as by [`Budget::keep`].
    #[must_use]
    pub fn keep_growing(&self) -> GrowingMemory {
        GrowingMemory::of([Arc::clone(&self.0.kept)].into(), self.half(PLANS))
    }

    /// As [`Budget::keep`], from another half of the budget, for what everything else needs: the names of a repository. No plan, mark or
    /// cache ever takes its place.
    ///
    /// # Errors
    /// As [`Budget::keep`].
    pub fn keep_state(&self, bytes: u64) -> Result<Retained> {
        self.keep_in(&self.0.states, "names and sessions", bytes)
    }

    /// As [`Budget::keep`], from another half of the budget, for what `agent` publishes for others, such as its inventory, of which
    /// `before` bytes are kept. No agent makes plans, or what others publish, wait.
    ///
    /// # Errors
    /// Exhausted, if all that is published would take more than half of the budget, or that of the agent more than a quarter of this.
    pub fn keep_published(&self, agent: impl fmt::Display, before: u64, bytes: u64) -> Result<Retained> {
        let most = self.kept_max() / PUBLISHED_PART;
        if before.saturating_add(bytes) > most {
            return Err(Error::exhausted("what an agent publishes takes more memory than it may")
                .at(agent)
                .expected(format!("at most {} MiB, an eighth of the memory budget", most / MIB))
                .got(format!("{} MiB", before.saturating_add(bytes).div_ceil(MIB)))
                .help("raise --memory"));
        }
        self.keep_in(&self.0.published, "inventories and reports of usage", bytes)
    }

    fn keep_in(&self, pool: &Arc<Semaphore>, what: &'static str, bytes: u64) -> Result<Retained> {
        let kept = Arc::clone(pool).try_acquire_many_owned(self.units(saturating_len(bytes))?);
        kept.map(Retained).map_err(|_| self.half(what).exceeded(bytes))
    }

    fn half(&self, what: &'static str) -> Limit {
        Limit { what, max: self.kept_max(), part: "half of the memory budget" }
    }

    /// Reserves `bytes` that other code allocates; all of the budget, if they are more.
    ///
    /// # Errors
    /// None in practice.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub async fn reserve(&self, bytes: u64) -> Result<Reservation> {
        let len = usize::try_from(bytes.min(self.0.total)).unwrap_or(usize::MAX);
        Ok(Reservation(self.acquire(self.units(len)?).await?))
    }

    async fn acquire(&self, units: u32) -> Result<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.0.permits).try_acquire_many_owned(units) {
            return Ok(permit);
        }
        let _waiting = Waiting::announce(&self.0);
        let acquired = Arc::clone(&self.0.permits).acquire_many_owned(units).await;
        acquired.map_err(|_| Error::other("memory budget was closed"))
    }

    fn units(&self, len: usize) -> Result<u32> {
        let units = (len as u64).div_ceil(UNIT).max(1);
        if units.saturating_mul(UNIT) > self.0.total {
            return Err(Error::exhausted("memory budget cannot hold this")
                .expected(format!("at most {} MiB", self.0.total / MIB))
                .got(format!("{} MiB", (len as u64).div_ceil(MIB)))
                .help("raise --memory"));
        }
        u32::try_from(units).map_err(|_| Error::exhausted("buffer is too large").got(len))
    }

    fn take_free(&self, len: usize) -> Option<Buffer> {
        let mut pool = self.0.lock();
        let fits = |capacity: usize| capacity >= len && capacity / 2 <= len;
        // The one freed last is the likeliest to be in the processor's cache.
        let at = pool.free.iter().rposition(|(bytes, _)| fits(bytes.len()))?;
        let (bytes, permit) = pool.free.remove(at);
        Some(Buffer { bytes, len, permit: Some(permit), home: Arc::clone(&self.0) })
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Budget({} MiB)", self.0.total / MIB)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While one exists, freed buffers give their permits back rather than wait in the pool.
struct Waiting<'a>(&'a Shared);

impl<'a> Waiting<'a> {
    fn announce(shared: &'a Shared) -> Self {
        let mut pool = shared.lock();
        pool.waiting += 1;
        pool.free.clear();
        Self(shared)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.lock().waiting -= 1;
    }
}

/// Memory that [`Budget::charge`] reserved, released on drop.
#[derive(Debug)]
pub struct Charge {
    _structure: OwnedSemaphorePermit,
    _buffers: Option<OwnedSemaphorePermit>,
}

/// Memory that [`Budget::keep`] counts, released on drop.
#[derive(Debug)]
pub struct Retained(#[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit);

/// Memory that [`Budget::reserve`] reserved, released on drop.
#[derive(Debug)]
pub struct Reservation(OwnedSemaphorePermit);

impl Reservation {
    /// Releases all but `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let keep = usize::try_from(bytes.div_ceil(UNIT).max(1)).unwrap_or(usize::MAX);
        drop(self.0.split(self.0.num_permits().saturating_sub(keep)));
    }
}

/// Bytes that count against the budget until the buffer, or the last [`Bytes`] that it froze into, is dropped.
pub struct Buffer {
    bytes: Memory,
    len: usize,
    permit: Option<OwnedSemaphorePermit>,
    home: Arc<Shared>,
}

impl Buffer {
    /// Forgets all but the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Shares the bytes; slices of them keep the whole buffer.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len.min(self.bytes.len());
        &mut self.bytes[..len]
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        let bytes = std::mem::take(&mut self.bytes);
        let mut pool = self.home.lock();
        if pool.waiting == 0 && bytes.len() >= REUSE_MIN {
            pool.free.push((bytes, permit));
        } else {
            // The memory must be gone before the permit says so.
            drop(bytes);
            drop(permit);
        }
    }
}

fn saturating_len(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The cgroup's memory limit (v2, then v1), if it sets one
/// (<https://docs.kernel.org/admin-guide/cgroup-v2.html>, "memory.max").
fn cgroup_limit() -> Option<u64> {
    ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .iter()
        .find_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn budget() -> Budget {
        Budget::new(MEMORY_MIN).unwrap()
    }

    #[tokio::test]
    async fn what_is_carved_out_comes_back() {
        let budget = budget();
        let half = usize::try_from(budget.total() / 2).unwrap();
        let carved = budget.carve(budget.total() / 2).await.unwrap();
        let (own, theirs) = (carved.buffer(half).await.unwrap(), budget.buffer(half).await.unwrap());
        let whole = budget.buffer(2 * half);
        drop((carved, theirs));
        let mut whole = std::pin::pin!(whole);
        assert!(futures::poll!(&mut whole).is_pending(), "a buffer of what was carved out is left");
        drop(own);
        assert_eq!(whole.await.unwrap().len(), 2 * half);
    }

    #[tokio::test]
    async fn half_is_left_for_buffers_beside_what_is_carved_out() {
        let budget = budget();
        let eighth = budget.total() / 8;
        let mut carved = Vec::new();
        for _ in 0..4 {
            carved.push(budget.carve_beside_buffers(eighth).await.unwrap());
        }
        let mut fifth = std::pin::pin!(budget.carve_beside_buffers(eighth));
        assert!(futures::poll!(&mut fifth).is_pending());
        drop(budget.buffer(usize::try_from(budget.total() / 2).unwrap()).await.unwrap());
        carved.pop();
        fifth.await.unwrap();
        budget.carve_beside_buffers(budget.total() / 2 + 1).await.unwrap_err();
    }

    /// A wait for more than there will ever be stops everybody behind it.
    #[tokio::test]
    async fn half_can_be_had_beside_a_quarter_that_is_taken_for_good() {
        let budget = budget();
        let _for_good = budget.carve(budget.total() / 4).await.unwrap();
        drop(budget.carve_beside_buffers(budget.total() / 2).await.unwrap());
        let more = budget.carve_beside_buffers(budget.total() / 2 + 1).await.unwrap_err();
        assert_eq!(more.kind(), crate::error::ErrorKind::Exhausted);
    }

    #[tokio::test]
    async fn room_is_given_back_in_part_and_whole() {
        let budget = budget();
        let mut reservation = budget.reserve(u64::MAX).await.unwrap();
        let half = budget.reserve(MEMORY_MIN / 2);
        let mut half = std::pin::pin!(half);
        assert!(futures::poll!(&mut half).is_pending(), "more than all is all");
        reservation.shrink(MEMORY_MIN / 2);
        let half = half.await.unwrap();
        assert!(futures::poll!(std::pin::pin!(budget.reserve(1))).is_pending());
        reservation.shrink(MEMORY_MIN);
        drop(half);
        assert!(futures::poll!(std::pin::pin!(budget.reserve(MEMORY_MIN))).is_pending(), "it does not grow");
        drop(reservation);
        budget.reserve(MEMORY_MIN).await.unwrap();
    }

    #[tokio::test]
    async fn structures_wait_for_each_other_and_never_for_buffers() {
        let budget = budget();
        let all = usize::try_from(MEMORY_MIN).unwrap();
        let buffer = budget.buffer(all).await.unwrap();
        let first = budget.charge(MEMORY_MIN).await.unwrap();
        let second = budget.charge(1);
        let mut second = std::pin::pin!(second);
        assert!(futures::poll!(&mut second).is_pending(), "the budget is full of structures");
        drop((first, buffer));
        let second = second.await.unwrap();
        let whole = budget.buffer(all);
        let mut whole = std::pin::pin!(whole);
        assert!(futures::poll!(&mut whole).is_pending(), "what a structure takes is not there for buffers");
        drop(second);
        whole.await.unwrap();
        assert_eq!(budget.charge(MEMORY_MIN + 1).await.unwrap_err().kind(), crate::error::ErrorKind::Exhausted);
    }

    #[test]
    fn kept_structures_take_half_of_the_budget_and_never_wait() {
        let budget = budget();
        let first = budget.keep(budget.kept_max()).unwrap();
        for bytes in [1, budget.total(), u64::MAX] {
            assert_eq!(budget.keep(bytes).unwrap_err().kind(), crate::error::ErrorKind::Exhausted, "{bytes}");
        }
        drop(first);
        drop(budget.keep(1).unwrap());
    }

    #[test]
    fn what_an_agent_publishes_leaves_room_for_that_of_others_and_for_plans() {
        let budget = budget();
        let most = budget.kept_max() / PUBLISHED_PART;
        let first = budget.keep_published("home/a", 0, most).unwrap();
        assert!(budget.keep_published("home/a", most, 1).is_err(), "it has its share");
        let next = budget.keep_published("home/a", 0, most).unwrap();
        let other = budget.keep_published("home/b", most / 2, most / 2).unwrap();
        assert!(budget.keep(budget.kept_max()).is_ok());
        drop((first, next, other));
    }

    #[tokio::test]
    async fn a_waiter_gets_what_a_drop_gives_back() {
        let budget = budget();
        let all = usize::try_from(MEMORY_MIN).unwrap();
        let held = budget.buffer(all).await.unwrap();
        let waiter = tokio::spawn({
            let budget = budget.clone();
            async move { budget.buffer(all / 2).await.map(|b| b.len()) }
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(!waiter.is_finished());
        drop(held.freeze());
        assert_eq!(waiter.await.unwrap().unwrap(), all / 2);
    }

    #[tokio::test]
    async fn pooled_buffers_yield_to_another_size() {
        let budget = budget();
        let all = usize::try_from(MEMORY_MIN).unwrap();
        drop(budget.buffer(all).await.unwrap());
        let small = budget.buffer(REUSE_MIN).await.unwrap();
        assert_eq!(small.len(), REUSE_MIN);
    }

    #[tokio::test]
    async fn what_can_never_fit_is_refused_at_once() {
        let error = budget().buffer(usize::try_from(MEMORY_MIN).unwrap() + 1).await.unwrap_err();
        assert_eq!(error.kind(), crate::error::ErrorKind::Exhausted);
    }

    #[test]
    fn too_small_a_budget_is_a_usage_error() {
        assert_eq!(Budget::new(1).unwrap_err().kind(), crate::error::ErrorKind::Usage);
    }
}
