//! Regular look at the folder of the cache: it may be removed or replaced while the agent runs.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use super::state::AgentState;
use crate::work::blocking;

/// Time between two looks.
const EVERY: Duration = Duration::from_secs(5);
/// Name of its problem.
const CACHE: &str = "cache";

/// Keeps the problem of the cache's folder up to date until it is dropped.
///
/// # Cancel safety
/// Safe.
pub(super) async fn watch(state: Arc<AgentState>) {
    let Ok(exchange) = state.exchange() else { return };
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let cache = Arc::clone(exchange.cache());
        match blocking(move || Ok(cache.problem())).await {
            Ok(Some(problem)) => {
                if state.background.set(CACHE, problem.clone()) {
                    tracing::warn!("{problem}");
                }
            }
            Ok(None) | Err(_) => state.background.clear(CACHE),
        }
    }
}
