//! Limit of the large trees that are warmed at the same time: each takes memory for its lists of chunks until it ends.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::limits::MIB;
use crate::name::Name;
use crate::repository::log::State;

/// Chunks and files above which a tree is large: its lists take some 2 MiB.
const LARGE_MIN: u64 = 16 << 10;
/// Memory of an agent's share for each large tree, and limits of their number.
const MEMORY_EACH: u64 = 64 * MIB;
const AT_ONCE: std::ops::RangeInclusive<usize> = 2..=16;

/// Places of large trees.
#[derive(Debug)]
pub(in crate::agent) struct LargeTrees {
    warms: Lane,
    /// Fetches for readers, which do not wait for warms.
    fetches: Lane,
}

#[derive(Debug)]
struct Lane {
    all: Arc<Semaphore>,
    /// Half of them, for tokens and other agents.
    limited: Arc<Semaphore>,
}

/// Place of a tree, until this is dropped.
#[derive(Debug, Default)]
#[must_use]
pub(in crate::agent) struct TreePlace {
    _places: Vec<OwnedSemaphorePermit>,
}

impl LargeTrees {
    /// Places for an agent whose repositories have `memory` bytes each.
    pub(in crate::agent) fn new(memory: u64) -> Self {
        let wanted = usize::try_from(memory / MEMORY_EACH).unwrap_or(usize::MAX);
        let places = wanted.clamp(*AT_ONCE.start(), *AT_ONCE.end());
        let lane = || Lane { all: Arc::new(Semaphore::new(places)), limited: Arc::new(Semaphore::new(places / 2)) };
        Self { warms: lane(), fetches: lane() }
    }

    /// Place for the trees `names`, once there is one. `is_limited` is true for a token or another agent.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub(in crate::agent) async fn place<'n>(
        &self,
        state: &State,
        names: impl IntoIterator<Item = &'n Name>,
        (is_fetch, is_limited): (bool, bool),
    ) -> TreePlace {
        let values = names.into_iter().filter_map(|name| state.refs.get(name));
        let size = values.map(|value| value.chunks.saturating_add(value.files)).fold(0, u64::saturating_add);
        if size < LARGE_MIN {
            return TreePlace::default();
        }
        let lane = if is_fetch { &self.fetches } else { &self.warms };
        let mut places = Vec::new();
        // The smaller limit first: who waits for it holds no place of others.
        for places_of in is_limited.then_some(&lane.limited).into_iter().chain([&lane.all]) {
            // Never closed.
            places.extend(Arc::clone(places_of).acquire_owned().await.ok());
        }
        TreePlace { _places: places }
    }
}
