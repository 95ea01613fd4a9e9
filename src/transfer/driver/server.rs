//! The serving side as a future: demands go to the holdings, answers come back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::{AbortHandle, Abortable, BoxFuture};
use futures::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Clockwork;
use super::lanes::{Incoming, Lanes};
use crate::error::Result;
use crate::id::{ChunkId, ManifestId};
use crate::transfer::identity::Identity;
use crate::transfer::log_limit::LogLimit;
use crate::transfer::protocol::{Asked, CONTROL, Closed, Demand, Grant, Provider, Supply, Survey};
use crate::transfer::transport::words;
use crate::transfer::{Holdings, Pass, Seat};

/// Lines about requests that cannot be served.
static NOT_SERVED: LogLimit = LogLimit::new();

/// Answer of the holdings to a demand.
enum Answer {
    Granted(u64, Result<Option<Arc<Grant>>>),
    Surveyed(u64, Result<Option<Survey>>),
    Read(u64, u32, Result<Option<Supply>>),
    /// Work was aborted, and is gone.
    Over(u64),
}

/// Parts that serve a connection.
pub(in crate::transfer) struct Served {
    /// Source of chunks.
    pub(in crate::transfer) holdings: Arc<dyn Holdings>,
    /// Limits of the peer's requests.
    pub(in crate::transfer) pass: Pass,
    /// Begins the connection's end: open requests are still served.
    pub(in crate::transfer) leaving: CancellationToken,
}

/// Answers to come, and how to abort those that may be.
#[derive(Default)]
struct Answers {
    // Bounded: a request waits for one answer or for the reads that the provider allows.
    coming: FuturesUnordered<BoxFuture<'static, Answer>>,
    aborts: HashMap<u64, AbortHandle>,
}

/// Serves a connection to its end.
///
/// # Cancel safety
/// Safe: the connection is dropped.
pub(in crate::transfer) async fn serve(
    mut provider: Provider,
    mut lanes: Lanes,
    clock: Clockwork,
    served: Served,
) -> Closed {
    let Served { holdings, pass, leaving } = served;
    let (peer, seat) = (Arc::new(provider.peer().clone()), holdings.seat(provider.peer()));
    let mut asker = Asker { holdings: Arc::clone(&holdings), peer, pass, seat };
    let (mut answers, mut left) = (Answers::default(), false);
    let closed = loop {
        provider.read_ahead(asker.seat.share(provider.is_asked()));
        if lanes.flush(|lane| provider.transmit(lane, clock.now())) {
            provider.wrote(clock.now());
        }
        let (mut closed, mut refused) = (None, false);
        while let Some(demand) = provider.poll() {
            if let Demand::Closed(why) = demand {
                closed = Some(why);
                continue;
            }
            if let Err((request, why)) = answers.begin(demand, &asker, provider.requested()) {
                provider.busy(request, &why, clock.now());
                refused = true;
            }
        }
        if let Some(closed) = closed {
            break closed;
        }
        // The refusals go out before anything else.
        if refused {
            continue;
        }
        asker.seat.share(provider.is_asked());
        asker.pass.holds(provider.requested());
        let timeout = provider.timeout().map_or_else(Instant::now, |at| clock.at(at));
        tokio::select! {
            incoming = lanes.next() => match incoming {
                Some(Incoming::Bytes(lane, bytes)) => provider.handle(lane, &bytes, clock.now()),
                Some(Incoming::Ended(error)) => provider.lost(&words(&error)),
                None => {}
            },
            Some(answer) = answers.coming.next() => {
                answers.forget(&answer);
                take(&mut provider, answer, clock.now());
            }
            () = leaving.cancelled(), if !left => {
                left = true;
                provider.goodbye("shutting down", clock.now());
            }
            () = sleep_until(timeout) => {
                provider.brought(holdings.brought());
                provider.expire(clock.now());
            }
        }
    };
    drop(asker);
    lanes.finish(|| provider.transmit(CONTROL, clock.now())).await;
    closed
}

impl Answers {
    /// Begins what is demanded of a connection whose open requests take `requested` bytes of memory.
    ///
    /// # Errors
    /// The request that its peer must not make now, and why not.
    fn begin(&mut self, demand: Demand, asker: &Asker, requested: u64) -> Result<(), (u64, String)> {
        let (request, answer) = match demand {
            Demand::Authorise { request, manifest } => (request, asker.authorise(request, manifest)),
            Demand::Survey { request, manifest, from } => (request, asker.survey(request, manifest, from)),
            Demand::Read { request, ordinal, id, asked, bound } => {
                let frame = asker.seat.within(bound, asker.frame(id, asked));
                self.coming.push(Box::pin(async move { Answer::Read(request, ordinal, frame.await) }));
                return Ok(());
            }
            Demand::Abort { request } => {
                self.abort(request);
                return Ok(());
            }
            Demand::Closed(_) => return Ok(()),
        };
        asker.pass.holds(requested);
        asker.pass.ask().and_then(|()| asker.pass.has_room()).map_err(|why| (request, why))?;
        self.abortable(request, answer);
        Ok(())
    }

    /// An answer to `request` that may be aborted.
    fn abortable(&mut self, request: u64, answer: BoxFuture<'static, Answer>) {
        let (abort, registration) = AbortHandle::new_pair();
        self.aborts.insert(request, abort);
        let answer = Abortable::new(answer, registration);
        self.coming.push(Box::pin(async move { answer.await.unwrap_or(Answer::Over(request)) }));
    }

    /// The answer to `request` is [`Answer::Over`], unless it is there already.
    fn abort(&self, request: u64) {
        if let Some(abort) = self.aborts.get(&request) {
            abort.abort();
        }
    }

    /// `answer` has come.
    fn forget(&mut self, answer: &Answer) {
        if let Answer::Granted(request, _) | Answer::Surveyed(request, _) | Answer::Over(request) = answer {
            self.aborts.remove(request);
        }
    }
}

/// Requests of one peer to the holdings.
struct Asker {
    holdings: Arc<dyn Holdings>,
    peer: Arc<Identity>,
    pass: Pass,
    seat: Seat,
}

impl Asker {
    fn authorise(&self, request: u64, manifest: ManifestId) -> BoxFuture<'static, Answer> {
        let (holdings, peer, work) = (Arc::clone(&self.holdings), Arc::clone(&self.peer), self.pass.work());
        Box::pin(async move {
            let _work = work.await;
            Answer::Granted(request, holdings.authorise(&peer, &manifest).await)
        })
    }

    fn survey(&self, request: u64, manifest: ManifestId, from: u32) -> BoxFuture<'static, Answer> {
        let (holdings, peer, work) = (Arc::clone(&self.holdings), Arc::clone(&self.peer), self.pass.work());
        Box::pin(async move {
            let _work = work.await;
            let surveyed = async {
                match holdings.authorise(&peer, &manifest).await? {
                    Some(grant) => holdings.survey(&grant, from).await.map(Some),
                    None => Ok(None),
                }
            };
            Answer::Surveyed(request, surveyed.await)
        })
    }

    fn frame(&self, id: ChunkId, asked: Asked) -> impl Future<Output = Result<Option<Supply>>> + Send + use<> {
        let (holdings, peer) = (Arc::clone(&self.holdings), Arc::clone(&self.peer));
        async move { holdings.frame(&peer, &asked, &id).await }
    }
}

fn take(provider: &mut Provider, answer: Answer, now: Duration) {
    match answer {
        Answer::Over(request) => provider.over(request, now),
        Answer::Granted(request, Ok(grant)) => provider.granted(request, grant, now),
        Answer::Surveyed(request, Ok(survey)) => provider.surveyed(request, survey, now),
        Answer::Granted(request, Err(error)) | Answer::Surveyed(request, Err(error)) => {
            // Details go to our log only: they may name what the peer must not know.
            if let Some(kept_back) = NOT_SERVED.may() {
                tracing::warn!(peer = %provider.peer(), kept_back, "request cannot be served: {error:?}");
            }
            provider.failed(request, "request cannot be served now", now);
        }
        Answer::Read(request, ordinal, supply) => {
            let supply = supply.unwrap_or_else(|error| {
                if let Some(kept_back) = NOT_SERVED.may() {
                    tracing::warn!(peer = %provider.peer(), kept_back, "chunk cannot be read: {error:?}");
                }
                None
            });
            provider.supply(request, ordinal, supply, now);
        }
    }
}
