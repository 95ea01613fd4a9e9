//! Warm: bringing a tree's chunks into an agent's cache before somebody needs them, and pinning them there.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use crate::cache::{Cache, Pin, PinChunk, PinRequest, Pinned};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::repository::{Name, Repository, Saved};
use crate::transfer::exchange::{Exchange, From};
use crate::transfer::protocol::Priority;
use crate::work::blocking;

/// How to warm.
#[derive(Clone, Debug, Default)]
pub struct WarmOptions {
    /// Where what is lacking may come from.
    pub from: From,
    /// Whether to keep it, and for whom.
    pub pin: Option<Pinning>,
    /// Moves as chunks come.
    pub progress: Progress,
}

/// A promise to keep what is warmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinning {
    /// Who asks.
    pub owner: String,
    /// When it ends by itself, if it does.
    pub expires: Option<Timestamp>,
}

/// What warming did.
#[derive(Clone, Debug, Serialize)]
pub struct Warmed {
    /// What was warmed.
    pub name: Name,
    /// Which tree that was.
    pub manifest: String,
    /// Chunks of the tree, with those that they need.
    pub chunks: u64,
    /// Their stored bytes.
    pub bytes: u64,
    /// Those that were lacking.
    pub lacking: u64,
    /// Their stored bytes.
    pub lacking_bytes: u64,
    /// Those that are lacking still: nobody gave them, or the cache has no room.
    pub missing: u64,
    /// The promise to keep them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
    /// How long it took.
    pub seconds: f64,
}

/// Brings into the cache of `exchange` what the tree `name` of `repository` consists of and what is not there. A pin that was asked
/// for before takes the place of an earlier one of the same owner for the same name.
///
/// # Errors
/// Not found, for a name that is not there; exhausted, if a pin is asked for that does not fit, and then nothing is brought;
/// damaged or unreachable, as the repository says. Chunks that nobody gives are no error: see [`Warmed::missing`].
///
/// # Cancel safety
/// Safe: what has come stays, and is not brought again the next time; so does a pin.
#[tracing::instrument(skip_all, fields(%name))]
pub async fn warm(exchange: &Exchange, repository: &Repository, name: &Name, options: &WarmOptions) -> Result<Warmed> {
    let begun = Instant::now();
    options.progress.phase("looking", 0);
    let saved = repository.saved(name).await?.shared();
    let (tree, cache) = (Arc::clone(&saved), Arc::clone(exchange.cache()));
    let looked = blocking(move || look(&tree, &cache)).await?;
    let pin = match &options.pin {
        Some(pinning) => {
            let (tree, cache, pinning) = (Arc::clone(&saved), Arc::clone(exchange.cache()), pinning.clone());
            Some(blocking(move || pin(&tree, &cache, &pinning)).await?.id.to_string())
        }
        None => None,
    };
    options.progress.phase("warming", looked.lacking_plain);
    exchange.warm(repository, &saved, &looked.lacking, (&options.from, Priority::Warm), &options.progress).await;
    let (tree, cache) = (Arc::clone(&saved), Arc::clone(exchange.cache()));
    let left = blocking(move || look(&tree, &cache)).await?;
    Ok(Warmed {
        name: name.clone(),
        manifest: saved.value.manifest.to_string(),
        chunks: saved.located_chunks().into(),
        bytes: looked.bytes,
        lacking: looked.lacking.len() as u64,
        lacking_bytes: looked.lacking_bytes,
        missing: left.lacking.len() as u64,
        pin,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// What of a tree is in a cache.
struct Looked {
    bytes: u64,
    lacking: Vec<u32>,
    lacking_bytes: u64,
    lacking_plain: u64,
}

fn look(saved: &Saved, cache: &Cache) -> Result<Looked> {
    let mut looked = Looked { bytes: 0, lacking: Vec::new(), lacking_bytes: 0, lacking_plain: 0 };
    for chunk in 0..saved.located_chunks() {
        let located = saved.locate(chunk)?;
        looked.bytes += u64::from(located.place.stored_len);
        if !cache.contains(&located.id) {
            looked.lacking.push(chunk);
            looked.lacking_bytes += u64::from(located.place.stored_len);
            looked.lacking_plain += u64::from(located.place.plain_len);
        }
    }
    Ok(looked)
}

/// Pins a tree for `pinning`, in the place of what its owner has pinned for the same name.
fn pin(saved: &Saved, cache: &Cache, pinning: &Pinning) -> Result<Pin> {
    let reason = saved.name.to_string();
    let before: Vec<Pin> =
        cache.pins().into_iter().filter(|pin| pin.owner == pinning.owner && pin.reason == reason).collect();
    let chunk = |number| {
        let located = saved.locate(number)?;
        Ok(PinChunk { id: located.id, stored_len: located.place.stored_len })
    };
    let chunks = (0..saved.located_chunks()).map(chunk).collect::<Result<_>>()?;
    let request = PinRequest { owner: pinning.owner.clone(), reason, expires: pinning.expires, chunks };
    match cache.pin(request)? {
        Pinned::Kept(pin) => {
            for earlier in before {
                cache.unpin(earlier.id)?;
            }
            Ok(pin)
        }
        Pinned::Lacking { bytes } => Err(Error::exhausted("pin does not fit in the cache")
            .at(&saved.name)
            .got(format!("{bytes} bytes too few"))
            .cure("end other pins (towline pins, towline unpin), or raise the cache's capacity")),
    }
}
