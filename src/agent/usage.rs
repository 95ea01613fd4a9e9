//! Usage: the agent publishes what it has moved this month, for `towline usage` and the prices of hints.
//!
//! Every process of an agent writes one object a month, again and again, so that nothing is read before it is written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::state::AgentState;
use crate::clock::Timestamp;
use crate::error::{ErrorKind, Result};
use crate::format::{Direction, Month, SignedBytes, UsageKey, UsageReport, UsageTotals};
use crate::metrics::Metric;
use crate::ops::SaveReport;
use crate::repository::Repository;
use crate::repository::log::{LabelView, labelled_name};
use crate::transfer::identity::{Context, Credentials};
use crate::transfer::ledger::{Ledger, MovedKey, NamedTree};

/// Interval at which what moved is added to its day.
const COUNT_EVERY: Duration = Duration::from_mins(1);
/// Maximum number of lines with a name, and of bytes in all names together: a report must fit its limits. Lines without a name are few:
/// one for each day, direction and site.
const NAMED_MAX: usize = 16 << 10;
const TEXT_MAX: usize = 4 << 20;
/// Time without further tries after the store has refused one.
const REFUSED_FOR: Duration = Duration::from_hours(1);
/// Time for the last report of an agent that ends.
const LAST_WITHIN: Duration = Duration::from_secs(3);

/// Publication of usage while the agent runs.
#[derive(Debug)]
pub(super) struct UsagePublication {
    publishing: JoinSet<()>,
    ending: CancellationToken,
}

impl UsagePublication {
    /// Begins to publish the usage of `state`'s agent every `every`; none, if it has no identity to sign with. Within a runtime.
    pub(super) fn begin(state: &Arc<AgentState>, every: Duration) -> Option<Self> {
        let (credentials, exchange) = (state.credentials().ok()?.clone(), state.exchange().ok()?);
        let places = state.stores().iter().cloned().map(|repository| Place::new(repository, state.started)).collect();
        let counting =
            Counting { ledger: Arc::clone(exchange.peers().ledger()), credentials, places, sites: BTreeMap::new() };
        let (mut publishing, ending) = (JoinSet::new(), CancellationToken::new());
        publishing.spawn(counting.run(every, ending.clone()));
        Some(Self { publishing, ending })
    }

    /// Publishes the last report.
    ///
    /// # Cancel safety
    /// The report may be lost.
    pub(super) async fn end(mut self) {
        self.ending.cancel();
        if timeout(LAST_WITHIN, self.publishing.join_next()).await.is_err() {
            tracing::warn!("usage since the last report is not published: the store does not answer in time");
        }
    }
}

/// Counts a checkpoint that was saved to `repository`.
pub(super) fn count_saved(ledger: &Ledger, repository: &Repository, report: &SaveReport) {
    if let Ok(name) = report.name.parse() {
        ledger.written(NamedTree { repository: repository.id(), name }, report.stored_bytes);
    }
}

struct Counting {
    ledger: Arc<Ledger>,
    credentials: Credentials,
    /// One for each repository, the default one first.
    places: Vec<Place>,
    /// Bytes exchanged with the agents of each site.
    sites: BTreeMap<(String, Direction), Exchanged>,
}

/// Bytes exchanged with a site, since the agent started.
#[derive(Clone, Copy, Debug, Default)]
struct Exchanged {
    /// Chunks.
    chunks: u64,
    /// Everything else that was reported: protocol, TLS, calls.
    overhead: u64,
}

/// Usage of one repository.
struct Place {
    repository: Repository,
    started: Timestamp,
    sequence: u64,
    months: BTreeMap<Month, Lines>,
    /// Reported part of the store's counters, by direction.
    stored: BTreeMap<Direction, UsageTotals>,
    refused: Option<Instant>,
}

/// Lines of a month.
#[derive(Default)]
struct Lines {
    totals: BTreeMap<UsageKey, UsageTotals>,
    /// Lines with a name, and the bytes of their names.
    named: usize,
    text: usize,
    /// True if they have grown since they were published.
    grown: bool,
}

impl Counting {
    async fn run(mut self, every: Duration, ending: CancellationToken) {
        let mut ticks = interval(COUNT_EVERY.min(every));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut published = Instant::now();
        loop {
            let ended = tokio::select! {
                () = ending.cancelled() => true,
                _ = ticks.tick() => false,
            };
            self.count();
            if ended || published.elapsed() >= every {
                for place in &mut self.places {
                    place.publish_unless_refused(&self.credentials).await;
                }
                published = Instant::now();
            }
            if ended {
                return;
            }
        }
    }

    /// Adds what moved since the last call to the lines of today.
    fn count(&mut self) {
        let Some(first) = self.places.first() else { return };
        let today = Month::of(first.repository.clock().now());
        let default = first.repository.id();
        let moved = self.ledger.take_unreported();
        for (MovedKey { tree, way, site }, totals) in moved {
            let of = tree.as_ref().map_or(default, |tree| tree.repository);
            if let Some(site) = &site {
                self.sites.entry((site.clone(), way)).or_default().chunks += totals.bytes;
            }
            let Some(place) = self.places.iter_mut().find(|place| place.repository.id() == of) else { continue };
            if site.is_none() {
                place.count_named(way, totals);
            }
            let name = tree.map(|tree| labelled_name(&tree.name).to_string()).unwrap_or_default();
            place.add(today, (way, site.unwrap_or_default(), name), totals);
        }
        self.count_overhead(today);
        self.places.iter_mut().for_each(|place| place.count_store(today));
    }

    /// Adds the bytes on the sockets that are no chunks.
    fn count_overhead(&mut self, today: (Month, u8)) {
        let mut wire: BTreeMap<(String, Direction), u64> = BTreeMap::new();
        for link in self.ledger.links() {
            // towline://SITE/AGENT
            let site = link.peer.rsplit('/').nth(1).unwrap_or_default().to_owned();
            *wire.entry((site.clone(), Direction::In)).or_default() += link.received;
            *wire.entry((site, Direction::Out)).or_default() += link.sent;
        }
        let Some(place) = self.places.first_mut() else { return };
        for ((site, way), bytes) in wire {
            let known = self.sites.entry((site.clone(), way)).or_default();
            let more = bytes.saturating_sub(known.chunks).saturating_sub(known.overhead);
            known.overhead += more;
            place.add(today, (way, site, String::new()), UsageTotals { bytes: more, ..UsageTotals::default() });
        }
    }
}

impl Place {
    fn new(repository: Repository, started: Timestamp) -> Self {
        Self { repository, started, sequence: 0, months: BTreeMap::new(), stored: BTreeMap::new(), refused: None }
    }

    /// Adds bytes to or from a site, of a name.
    fn add(&mut self, (month, day): (Month, u8), (way, site, name): (Direction, String, String), more: UsageTotals) {
        if more == UsageTotals::default() {
            return;
        }
        let lines = self.months.entry(month).or_default();
        lines.grown = true;
        let mut key = UsageKey { day, way, site, name, tenant: String::new() };
        if !lines.totals.contains_key(&key) {
            let has_room = lines.named < NAMED_MAX && lines.text + key.name.len() <= TEXT_MAX;
            if !has_room {
                key.name.clear();
            }
            lines.named += usize::from(!key.name.is_empty());
            lines.text += key.name.len();
        }
        lines.totals.entry(key).or_default().add(more);
    }

    /// Bytes and requests of the store in one direction, by its counters. Lists cost as much as writes.
    fn counters(&self, way: Direction) -> UsageTotals {
        let get = |metric| self.repository.store().counters().get(metric);
        let (bytes, requests) = match way {
            Direction::In => (get(Metric::GetBytes), get(Metric::GetRequests)),
            Direction::Out => (get(Metric::PutBytes), get(Metric::PutRequests) + get(Metric::ListRequests)),
        };
        UsageTotals { bytes, requests, gpu_seconds: 0 }
    }

    /// Counts bytes by the name of their tree. What was counted without a name before, as a save tells its name only at its end, is
    /// taken from there.
    fn count_named(&mut self, way: Direction, totals: UsageTotals) {
        let all = self.counters(way);
        let reported = self.stored.entry(way).or_default();
        reported.add(totals);
        let mut twice = reported.beyond(all);
        *reported = reported.beyond(twice);
        // The newest lines first: they were counted while the save went on.
        for lines in self.months.values_mut().rev() {
            let unnamed = |key: &UsageKey| key.way == way && key.site.is_empty() && key.name.is_empty();
            for (_, line) in lines.totals.iter_mut().rev().filter(|(key, _)| unnamed(key)) {
                let left = line.beyond(twice);
                twice = twice.beyond(*line);
                lines.grown |= left != *line;
                *line = left;
            }
        }
    }

    /// Counts what the store was asked for beside chunks: log, index, manifests, maps, and failed reads.
    fn count_store(&mut self, today: (Month, u8)) {
        for way in [Direction::In, Direction::Out] {
            let all = self.counters(way);
            let reported = self.stored.entry(way).or_default();
            let more = all.beyond(*reported);
            reported.add(more);
            self.add(today, (way, String::new(), String::new()), more);
        }
    }

    async fn publish_unless_refused(&mut self, credentials: &Credentials) {
        if self.refused.is_some_and(|since| since.elapsed() < REFUSED_FOR) {
            return;
        }
        self.refused = None;
        match self.publish(credentials).await {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unsupported) => {
                let at = self.repository.store().location();
                tracing::warn!("usage is not published at {at}, tried again in an hour: {error:?}");
                self.refused = Some(Instant::now());
            }
            Err(error) => tracing::warn!("usage is not published, tried again: {error:?}"),
        }
    }

    /// Publishes the months that have grown; forgets those that are over.
    async fn publish(&mut self, credentials: &Credentials) -> Result<()> {
        let (now, identity) = (self.repository.clock().now(), credentials.identity());
        let grown: Vec<Month> = self.months.iter().filter(|(_, lines)| lines.grown).map(|(month, _)| *month).collect();
        if !grown.is_empty() {
            let state = self.repository.state().await?;
            let view = self.repository.label_view(&state);
            for month in grown {
                let Some(lines) = self.months.get(&month) else { continue };
                self.sequence += 1;
                let report = UsageReport {
                    repository: self.repository.id(),
                    month,
                    started: self.started,
                    sequence: self.sequence,
                    at: now,
                    lines: with_tenants(&lines.totals, &view),
                };
                let bytes = report.encode();
                let signature = credentials.sign(Context::Usage, &bytes)?.encode()?;
                let signed = SignedBytes { bytes, signature };
                self.repository.put_usage(month, &identity, self.started, &signed.encode()).await?;
                if let Some(lines) = self.months.get_mut(&month) {
                    lines.grown = false;
                }
            }
        }
        let (current, _) = Month::of(now);
        self.months.retain(|month, lines| lines.grown || *month >= current);
        Ok(())
    }
}

/// The lines with the tenants that their names have now.
fn with_tenants(totals: &BTreeMap<UsageKey, UsageTotals>, view: &LabelView<'_>) -> Vec<(UsageKey, UsageTotals)> {
    let names: BTreeSet<&str> = totals.keys().map(|key| key.name.as_str()).collect();
    let tenant = |name: &str| name.parse().map(|name| view.of(&name).tenants_text()).unwrap_or_default();
    let tenants: BTreeMap<&str, String> = names.into_iter().map(|name| (name, tenant(name))).collect();
    let line = |(key, totals): (&UsageKey, &UsageTotals)| {
        let tenant = tenants.get(key.name.as_str()).cloned().unwrap_or_default();
        (UsageKey { tenant, ..key.clone() }, *totals)
    };
    totals.iter().map(line).collect()
}
