//! The serving side as a future: executes demands of the protocol on the served chunks, and returns their answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::{AbortHandle, Abortable, BoxFuture};
use futures::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::ConnectionClock;
use super::lanes::{Incoming, Lanes};
use crate::error::{Error, ErrorKind, Result};
use crate::id::ManifestId;
use crate::identity::Identity;
use crate::log_limit::LogLimit;
use crate::policy::Route;
use crate::transfer::connection_error::describe;
use crate::transfer::policy_versions::PolicyVersions;
use crate::transfer::protocol::{
    AskedChunk, CONTROL, Closed, Demand, FrameRequest, Grant, Hello, OutgoingFrame, Provider, Survey,
};
use crate::transfer::{ConnectionPermit, ReadAheadShare, ServedChunks};

/// Rate limit of log lines about requests that cannot be served.
static NOT_SERVED: LogLimit = LogLimit::new();

/// Answer to a demand.
enum Answer {
    Granted(u64, Result<Option<Arc<Grant>>>),
    Surveyed(u64, Result<Option<Survey>>),
    Read(u64, u32, Result<Option<OutgoingFrame>>),
    /// Work that was aborted and is gone.
    Over(u64),
}

/// Parts that serve a connection.
pub(in crate::transfer) struct ServedConnection {
    /// Source of chunks.
    pub(in crate::transfer) served_chunks: Arc<dyn ServedChunks>,
    /// Limits of the peer's requests.
    pub(in crate::transfer) permit: ConnectionPermit,
    /// Route to the peer.
    pub(in crate::transfer) route: Route,
    /// Begins to close the connection; open requests are still served.
    pub(in crate::transfer) leaving: CancellationToken,
    /// Place for the versions of policies that the peer tells.
    pub(in crate::transfer) versions: Option<Arc<PolicyVersions>>,
}

/// Pending answers, and handles to abort those that may be aborted.
#[derive(Default)]
struct Answers {
    // Bounded: each request waits for one answer or for the reads that the provider allows.
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
    clock: ConnectionClock,
    served: ServedConnection,
) -> Closed {
    let ServedConnection { served_chunks, permit, route, leaving, mut versions } = served;
    let (peer, share) = (Arc::new(provider.peer().clone()), served_chunks.read_ahead_share(provider.peer()));
    let mut handler = RequestHandler { served_chunks: Arc::clone(&served_chunks), peer, route, permit, share };
    let (mut answers, mut left) = (Answers::default(), false);
    let closed = loop {
        provider.read_ahead(handler.share.limit(provider.has_open_requests()));
        if lanes.flush(|lane| provider.transmit(lane, clock.now())) {
            provider.wrote(clock.now());
        }
        // Before its requests, which are ruled on by what it tells.
        if let Some(theirs) = provider.theirs()
            && let Some(versions) = versions.take()
            && let Some(told) = theirs.extension(Hello::POLICY_VERSIONS)
        {
            versions.record_announcement(told, Instant::now());
        }
        let (mut closed, mut refused) = (None, false);
        while let Some(demand) = provider.poll() {
            if let Demand::Closed(why) = demand {
                closed = Some(why);
                continue;
            }
            if let Err((request, why)) = answers.begin(demand, &handler, provider.requested()) {
                provider.busy(request, &why, clock.now());
                refused = true;
            }
        }
        if let Some(closed) = closed {
            break closed;
        }
        // Refusals are sent before anything else.
        if refused {
            continue;
        }
        handler.share.limit(provider.has_open_requests());
        handler.permit.set_request_memory(provider.requested());
        let timeout = provider.timeout().map_or_else(Instant::now, |at| clock.at(at));
        tokio::select! {
            incoming = lanes.next() => match incoming {
                Some(Incoming::Bytes(lane, bytes)) => provider.handle(lane, &bytes, clock.now()),
                Some(Incoming::Ended(error)) => provider.lost(&describe(&error)),
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
                provider.bytes_received(served_chunks.bytes_received());
                provider.expire(clock.now());
            }
        }
    };
    drop(handler);
    lanes.finish(|| provider.transmit(CONTROL, clock.now())).await;
    closed
}

impl Answers {
    /// Starts work for a demand on a connection whose open requests take `requested` bytes of memory.
    ///
    /// # Errors
    /// The request that the peer must not make now, and the reason.
    fn begin(&mut self, demand: Demand, handler: &RequestHandler, requested: u64) -> Result<(), (u64, String)> {
        let (request, answer) = match demand {
            Demand::Authorise { request, manifest } => (request, handler.authorise(request, manifest)),
            Demand::Survey { request, manifest, from } => (request, handler.survey(request, manifest, from)),
            Demand::Read { request, ordinal, chunk, asked, bound } => {
                let frame = handler.share.within(bound, handler.frame(chunk, asked));
                self.coming.push(Box::pin(async move { Answer::Read(request, ordinal, frame.await) }));
                return Ok(());
            }
            Demand::Abort { request } => {
                self.abort(request);
                return Ok(());
            }
            Demand::Closed(_) => return Ok(()),
        };
        handler.permit.set_request_memory(requested);
        handler
            .permit
            .admit_request()
            .and_then(|()| handler.permit.check_request_memory())
            .map_err(|why| (request, why))?;
        self.abortable(request, answer);
        Ok(())
    }

    /// Abortable answer to `request`.
    fn abortable(&mut self, request: u64, answer: BoxFuture<'static, Answer>) {
        let (abort, registration) = AbortHandle::new_pair();
        self.aborts.insert(request, abort);
        let answer = Abortable::new(answer, registration);
        self.coming.push(Box::pin(async move { answer.await.unwrap_or(Answer::Over(request)) }));
    }

    /// Makes the answer to `request` [`Answer::Over`], unless it is ready already.
    fn abort(&self, request: u64) {
        if let Some(abort) = self.aborts.get(&request) {
            abort.abort();
        }
    }

    /// Removes the abort handle of a finished `answer`.
    fn forget(&mut self, answer: &Answer) {
        if let Answer::Granted(request, _) | Answer::Surveyed(request, _) | Answer::Over(request) = answer {
            self.aborts.remove(request);
        }
    }
}

/// Executes the requests of one peer on the served chunks.
struct RequestHandler {
    served_chunks: Arc<dyn ServedChunks>,
    peer: Arc<Identity>,
    route: Route,
    permit: ConnectionPermit,
    share: ReadAheadShare,
}

impl RequestHandler {
    fn authorise(&self, request: u64, manifest: ManifestId) -> BoxFuture<'static, Answer> {
        let (served_chunks, peer, work) = (Arc::clone(&self.served_chunks), Arc::clone(&self.peer), self.permit.work());
        let route = self.route;
        Box::pin(async move {
            let _work = work.await;
            Answer::Granted(request, served_chunks.authorise_over(&peer, route, &manifest).await)
        })
    }

    fn survey(&self, request: u64, manifest: ManifestId, from: u32) -> BoxFuture<'static, Answer> {
        let (served_chunks, peer, work) = (Arc::clone(&self.served_chunks), Arc::clone(&self.peer), self.permit.work());
        let route = self.route;
        Box::pin(async move {
            let _work = work.await;
            let surveyed = async {
                match served_chunks.authorise_over(&peer, route, &manifest).await? {
                    Some(grant) => served_chunks.survey(&grant, from).await.map(Some),
                    None => Ok(None),
                }
            };
            Answer::Surveyed(request, surveyed.await)
        })
    }

    fn frame(
        &self,
        chunk: AskedChunk,
        asked: FrameRequest,
    ) -> impl Future<Output = Result<Option<OutgoingFrame>>> + Send + use<> {
        let (served_chunks, peer, route) = (Arc::clone(&self.served_chunks), Arc::clone(&self.peer), self.route);
        async move { served_chunks.frame_over(&peer, route, &asked, chunk).await }
    }
}

fn take(provider: &mut Provider, answer: Answer, now: Duration) {
    match answer {
        Answer::Over(request) => provider.over(request, now),
        Answer::Granted(request, Ok(grant)) => provider.granted(request, grant, now),
        Answer::Surveyed(request, Ok(survey)) => provider.surveyed(request, survey, now),
        Answer::Granted(request, Err(error)) | Answer::Surveyed(request, Err(error)) => {
            // Details go to the local log only: they may name what the peer must not know.
            if let Some(kept_back) = NOT_SERVED.may() {
                tracing::warn!(peer = %provider.peer(), kept_back, "request cannot be served: {error:?}");
            }
            let told = without_details(&error);
            if error.kind() == ErrorKind::Exhausted {
                provider.busy(request, told, now);
            } else {
                provider.failed(request, told, now);
            }
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

/// Answer to a peer about `error`.
fn without_details(error: &Error) -> &'static str {
    match error.kind() {
        // Nothing but the audit log is written before an answer.
        ErrorKind::Exhausted if error.is_of_full_disk() => "agent cannot record requests at present",
        ErrorKind::Exhausted => "too much is requested at a time",
        _ => "request cannot be served now",
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind as Io;
    use std::path::Path;

    use super::*;

    /// L1 "who asks for chunks is told only that the agent cannot record requests at present".
    #[test]
    fn a_full_disk_under_the_audit_log_is_not_the_requesters_fault() {
        let unwritten = |kind: Io| Error::io("cannot write the audit log", Path::new("/srv/audit"), kind.into());
        for (error, told) in [
            (unwritten(Io::StorageFull), "agent cannot record requests at present"),
            (unwritten(Io::QuotaExceeded), "agent cannot record requests at present"),
            (unwritten(Io::PermissionDenied), "request cannot be served now"),
            (Error::exhausted("agent is served too many trees"), "too much is requested at a time"),
        ] {
            assert_eq!(without_details(&error), told, "{error}");
        }
    }
}
