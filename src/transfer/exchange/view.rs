//! Snapshot of other agents for a plan.

use std::sync::Arc;

use futures::future::join_all;

use super::get::ChunkRequest;
use super::plan::{Candidate, HeldChunks, View};
use super::{Exchange, From};
use crate::id::ManifestId;
use crate::identity::Identity;
use crate::transfer::peers::Peer;

impl Exchange {
    /// Peers that may be asked, except those at the addresses `without`.
    pub(super) async fn view(
        &self,
        request: &ChunkRequest<'_>,
        without: &[Arc<str>],
    ) -> (View<Arc<str>>, Vec<Arc<Peer>>) {
        // A repository on this node's disk is nearer than any peer.
        let from = &request.policy.from;
        let here = *from == From::Anywhere && self.is_here(request.repository).await;
        let live = if here || *from == From::Repository { Vec::new() } else { self.peers.live().await };
        let origin = self.origin_rate();
        // By identity: another address of the same agent is no other source.
        let mut avoided = self.peers.identities_at(without);
        avoided.extend(self.peers.banned());
        if *from == From::Anywhere {
            avoided.extend(self.peers.late());
        }
        let mut asked: Vec<(Arc<Peer>, Identity, bool)> = Vec::new();
        for peer in live {
            let Some(identity) = peer.identity() else { continue };
            // A peer with two addresses counts once.
            if avoided.contains(&identity) || asked.iter().any(|(_, other, _)| *other == identity) {
                continue;
            }
            let near = self.is_near(request.repository.id(), &identity);
            let fits = match from {
                From::Anywhere => !near || request.through,
                From::Site(site) => identity.site() == site,
                From::Agent(agent) => identity == *agent,
                From::Repository => false,
            };
            // An explicitly named source is used however slow it is.
            let slow = *from == From::Anywhere && origin.is_some_and(|rate| peer.is_slower_than(rate));
            if fits && !slow {
                asked.push((peer, identity, near));
            }
        }
        let manifest = request.saved.value.manifest;
        let chunks = u32::try_from(request.saved.manifest.chunks.ids.len()).unwrap_or(u32::MAX);
        let held = match asked.as_slice() {
            // The only source, and far away: it is asked for chunks while it says which it holds, as a round trip takes long. What it
            // lacks is planned again.
            [(peer, _, false)] if peer.surveyed(&manifest).is_none() => {
                let peer = Arc::clone(peer);
                tokio::spawn(async move { peer.survey(manifest, chunks).await });
                vec![HeldChunks::all_of(chunks)]
            }
            _ => join_all(asked.iter().map(|(peer, ..)| held_by(peer, manifest, chunks))).await,
        };
        let through = request.through && *from == From::Anywhere;
        let repository = request.policy.reads_repository();
        let own = Some(self.identity.clone()).filter(|own| !own.is_spiffe());
        let mut view = View { own, site: Vec::new(), remote: Vec::new(), through, repository };
        let mut peers = Vec::with_capacity(asked.len());
        for ((peer, identity, near), held) in asked.into_iter().zip(held) {
            let candidate = Candidate { peer: Arc::clone(peer.address()), identity, held };
            if near {
                view.site.push(candidate);
            } else {
                view.remote.push(candidate);
            }
            peers.push(peer);
        }
        (view, peers)
    }
}

/// Chunks of `manifest`, which has `chunks`, that the peer holds.
async fn held_by(peer: &Peer, manifest: ManifestId, chunks: u32) -> HeldChunks {
    let mut held = HeldChunks::none_of(chunks);
    peer.survey(manifest, chunks).await.iter().for_each(|place| held.insert(place));
    held
}
