//! Warm: bringing a tree's chunks into an agent's cache before somebody needs them, and pinning them there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::shown;
use super::subpath::{entry, within};
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
    /// Only this file or folder of the tree, and what it needs.
    pub below: Option<Vec<u8>>,
    /// How urgent it is to the peers that are asked.
    pub priority: Priority,
    /// Where what is lacking may come from.
    pub from: From,
    /// Whether to keep it, and for whom.
    pub pin: Option<Pinning>,
    /// Only find out what is lacking: nothing is brought or pinned.
    pub dry_run: bool,
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

/// What warming did, or would do.
#[derive(Clone, Debug, Serialize)]
pub struct Warmed {
    /// Nothing was brought or pinned: these are the figures of a warming that is yet to come.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// What was warmed.
    pub name: Name,
    /// Which tree that was.
    pub manifest: String,
    /// Chunks of what was asked for, with those that they need.
    pub chunks: u64,
    /// Their stored bytes.
    pub bytes: u64,
    /// Those that were lacking.
    pub lacking: u64,
    /// Their stored bytes.
    pub lacking_bytes: u64,
    /// Those that are lacking still: nobody gave them, or the cache has no room. 0 in a dry run.
    pub missing: u64,
    /// The promise to keep them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
    /// How long it took.
    pub seconds: f64,
}

/// Brings into the cache of `exchange` what the tree `name` of `repository`, or a part of it, consists of and what is not there. A pin
/// that is asked for takes the place of an earlier one of the same owner for the same.
///
/// # Errors
/// Not found, for a name or a path that is not there; exhausted, if a pin is asked for that does not fit, and then nothing is brought;
/// damaged or unreachable, as the repository says. Chunks that nobody gives are no error: see [`Warmed::missing`].
///
/// # Cancel safety
/// Safe: what has come stays, and is not brought again the next time; so does a pin.
#[tracing::instrument(skip_all, fields(%name))]
pub async fn warm(exchange: &Exchange, repository: &Repository, name: &Name, options: &WarmOptions) -> Result<Warmed> {
    let begun = Instant::now();
    options.progress.phase("looking", 0);
    let saved = repository.saved(name).await?.shared();
    let (tree, below) = (Arc::clone(&saved), options.below.clone());
    let wanted = Arc::new(blocking(move || choose(&tree, below.as_deref())).await?);
    let look = || {
        let (tree, cache, wanted) = (Arc::clone(&saved), Arc::clone(exchange.cache()), Arc::clone(&wanted));
        blocking(move || look(&tree, &wanted, &cache))
    };
    let looked = look().await?;
    let warmed = Warmed {
        dry_run: options.dry_run,
        name: name.clone(),
        manifest: saved.value.manifest.to_string(),
        chunks: wanted.len() as u64,
        bytes: looked.bytes,
        lacking: looked.lacking.len() as u64,
        lacking_bytes: looked.lacking_bytes,
        missing: 0,
        pin: None,
        seconds: begun.elapsed().as_secs_f64(),
    };
    if options.dry_run {
        return Ok(warmed);
    }
    let pin = match options.pin.clone() {
        Some(pinning) => {
            let (tree, cache, wanted) = (Arc::clone(&saved), Arc::clone(exchange.cache()), Arc::clone(&wanted));
            let reason = reason(name, options.below.as_deref());
            Some(blocking(move || pin((&tree, &wanted), reason, &cache, pinning)).await?.id.to_string())
        }
        None => None,
    };
    options.progress.phase("warming", looked.lacking_plain);
    exchange.warm(repository, &saved, &looked.lacking, (&options.from, options.priority), &options.progress).await;
    let missing = look().await?.lacking.len() as u64;
    Ok(Warmed { missing, pin, seconds: begun.elapsed().as_secs_f64(), ..warmed })
}

/// What of a tree is in a cache.
struct Looked {
    bytes: u64,
    lacking: Vec<u32>,
    lacking_bytes: u64,
    lacking_plain: u64,
}

/// The chunks of a tree, or of the file or folder `below` in it, with all that they are decoded from.
fn choose(saved: &Saved, below: Option<&[u8]>) -> Result<Vec<u32>> {
    let Some(below) = below else { return Ok((0..saved.located_chunks()).collect()) };
    let below = below.strip_suffix(b"/").unwrap_or(below);
    entry(saved, below)?;
    let mut chosen = BTreeSet::new();
    for (_, content) in saved.manifest.files().filter(|(entry, _)| within(&entry.path, below).is_some()) {
        for piece in &content.pieces {
            for chunk in piece.first..piece.first + piece.count {
                let mut next = Some(chunk);
                while let Some(chunk) = next.filter(|&chunk| chosen.insert(chunk)) {
                    next = saved.locate(chunk)?.base;
                }
            }
        }
    }
    Ok(chosen.into_iter().collect())
}

fn look(saved: &Saved, wanted: &[u32], cache: &Cache) -> Result<Looked> {
    let mut looked = Looked { bytes: 0, lacking: Vec::new(), lacking_bytes: 0, lacking_plain: 0 };
    for &chunk in wanted {
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

/// What a pin is for, as `towline pins` shows it.
fn reason(name: &Name, below: Option<&[u8]>) -> String {
    below.map_or_else(|| name.to_string(), |below| format!("{name}:{}", shown(below)))
}

/// Pins chunks of a tree for `pinning`, in the place of what its owner has pinned for the same reason.
fn pin((saved, wanted): (&Saved, &[u32]), reason: String, cache: &Cache, pinning: Pinning) -> Result<Pin> {
    let Pinning { owner, expires } = pinning;
    let before: Vec<Pin> = cache.pins().into_iter().filter(|pin| pin.owner == owner && pin.reason == reason).collect();
    let chunk = |&number: &u32| {
        let located = saved.locate(number)?;
        Ok(PinChunk { id: located.id, stored_len: located.place.stored_len })
    };
    let chunks = wanted.iter().map(chunk).collect::<Result<_>>()?;
    let request = PinRequest { owner, reason, expires, chunks };
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
