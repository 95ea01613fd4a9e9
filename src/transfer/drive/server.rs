//! The serving side as a future: demands go to the holdings, answers come back.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Clockwork;
use super::lanes::{Incoming, Lanes};
use crate::error::Result;
use crate::transfer::Holdings;
use crate::transfer::carrier::words;
use crate::transfer::identity::Identity;
use crate::transfer::protocol::{CONTROL, Closed, Demand, Grant, Provider, Supply, Survey};

/// What the holdings say to a demand.
enum Answer {
    Granted(u64, Result<Option<Arc<Grant>>>),
    Surveyed(u64, Result<Option<Survey>>),
    Read(u64, u32, Result<Option<Supply>>),
}

/// Serves a connection to its end; `leaving` begins it: open requests are still served.
///
/// # Cancel safety
/// Safe: the connection is dropped.
pub(in crate::transfer) async fn serve(
    mut provider: Provider,
    mut lanes: Lanes,
    clock: Clockwork,
    holdings: Arc<dyn Holdings>,
    leaving: CancellationToken,
) -> Closed {
    let peer = Arc::new(provider.peer().clone());
    // Bounded: a request waits for one answer or for the reads that the provider allows.
    let mut answers: FuturesUnordered<BoxFuture<'static, Answer>> = FuturesUnordered::new();
    let (mut left, mut seat) = (false, holdings.seat());
    let closed = loop {
        provider.read_ahead(seat.share(provider.is_asked()));
        if lanes.flush(|lane| provider.transmit(lane, clock.now())) {
            provider.wrote(clock.now());
        }
        let mut closed = None;
        while let Some(demand) = provider.poll() {
            match demand {
                Demand::Closed(why) => closed = Some(why),
                demand => answers.extend(answer(&demand, &holdings, &peer)),
            }
        }
        if let Some(closed) = closed {
            break closed;
        }
        seat.share(provider.is_asked());
        let timeout = provider.timeout().map_or_else(Instant::now, |at| clock.at(at));
        tokio::select! {
            incoming = lanes.next() => match incoming {
                Some(Incoming::Bytes(lane, bytes)) => provider.handle(lane, &bytes, clock.now()),
                Some(Incoming::Ended(error)) => provider.lost(&words(&error)),
                None => {}
            },
            Some(answer) = answers.next() => take(&mut provider, answer, clock.now()),
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
    drop(seat);
    lanes.finish(|| provider.transmit(CONTROL, clock.now())).await;
    closed
}

fn answer(demand: &Demand, holdings: &Arc<dyn Holdings>, peer: &Arc<Identity>) -> Option<BoxFuture<'static, Answer>> {
    let (holdings, peer) = (Arc::clone(holdings), Arc::clone(peer));
    Some(match *demand {
        Demand::Authorise { request, manifest } => {
            Box::pin(async move { Answer::Granted(request, holdings.authorise(&peer, &manifest).await) })
        }
        Demand::Survey { request, manifest, from } => Box::pin(async move {
            let surveyed = async {
                match holdings.authorise(&peer, &manifest).await? {
                    Some(grant) => holdings.survey(&grant, from).await.map(Some),
                    None => Ok(None),
                }
            };
            Answer::Surveyed(request, surveyed.await)
        }),
        Demand::Read { request, ordinal, id, ref asked } => {
            let asked = asked.clone();
            Box::pin(async move { Answer::Read(request, ordinal, holdings.frame(&peer, &asked, &id).await) })
        }
        Demand::Closed(_) => return None,
    })
}

fn take(provider: &mut Provider, answer: Answer, now: Duration) {
    match answer {
        Answer::Granted(request, Ok(grant)) => provider.granted(request, grant, now),
        Answer::Surveyed(request, Ok(survey)) => provider.surveyed(request, survey, now),
        Answer::Granted(request, Err(error)) | Answer::Surveyed(request, Err(error)) => {
            // What exactly is for our log: it may name what the peer must not know.
            tracing::warn!(peer = %provider.peer(), "request cannot be served: {error:?}");
            provider.failed(request, "request cannot be served now", now);
        }
        Answer::Read(request, ordinal, supply) => {
            let supply = supply.unwrap_or_else(|error| {
                tracing::warn!(peer = %provider.peer(), "chunk cannot be read: {error:?}");
                None
            });
            provider.supply(request, ordinal, supply, now);
        }
    }
}
