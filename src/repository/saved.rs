//! An open saved tree: its manifest and map. The cost of opening it depends on the size of the tree, not of the repository.

use std::sync::Arc;

use tokio::time::Instant;

use super::guard::LastRulings;
use super::layout::{self, Family};
use super::log::RefValue;
use super::missing::no_such_name;
use super::{Repository, objects};
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::Kind;
use crate::format::{Manifest, Map};
use crate::id::{ManifestId, ManifestKey, MapKey};
use crate::name::Name;

/// Maximum tries to open a name that keeps changing.
const ATTEMPTS: usize = 5;

/// An open saved tree.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The name.
    pub name: Name,
    /// Value in the log.
    pub value: RefValue,
    /// The tree.
    pub manifest: Manifest,
    /// Places of its chunks.
    pub map: Map,
    /// Last rulings of the policy on it.
    pub(super) rulings: LastRulings,
}

impl Repository {
    /// Opens the current value of `name`.
    ///
    /// # Errors
    /// Not found, if there is no such name; damaged, if its manifest or map is; denied, if the policy does not let it come here.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn saved(&self, name: &Name) -> Result<Saved> {
        self.saved_since(name, Instant::now()).await
    }

    /// Opens the value that `name` had at `since` or later: a state that was read since then is not read again.
    ///
    /// # Errors
    /// As [`Repository::saved`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn saved_since(&self, name: &Name, since: Instant) -> Result<Saved> {
        let mut last = None;
        let mut known = self.log().seen_since(Some(since));
        for _ in 0..ATTEMPTS {
            let state = match known.take() {
                Some(state) => state,
                None => self.state().await?,
            };
            let missing = || no_such_name(&state.refs, name, self.store().location());
            let value = state.refs.get(name).ok_or_else(missing)?.clone();
            match self.saved_as(name, &value).await {
                // The tree was replaced or repacked between the two reads: reads the new keys.
                Err(error) if error.kind() == ErrorKind::NotFound && last.as_ref() != Some(&value) => {
                    last = Some(value);
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Err(Error::damaged("a saved tree's manifest or map is missing").at(name).source(error));
                }
                settled => return settled,
            }
        }
        Err(Error::busy("name moves faster than it can be read").at(name).help("try again"))
    }

    /// Opens one value of a name.
    ///
    /// # Errors
    /// Not found, if its objects do not exist; damaged, if they are.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn saved_as(&self, name: &Name, value: &RefValue) -> Result<Saved> {
        Ok(self.saved_verbatim(name, value).await?.0)
    }

    /// Opens one value of a name; also returns the body of the manifest.
    ///
    /// # Errors
    /// As [`Repository::saved_as`]; denied, if the policy does not let it come here.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn saved_verbatim(&self, name: &Name, value: &RefValue) -> Result<(Saved, bytes::Bytes)> {
        self.check_readable(name, &value.manifest).await?;
        let body = self.manifest_body(value.manifest_key, value.manifest);
        let (body, map) = futures::try_join!(body, self.map(value.map_key))?;
        let manifest = self.decoded(value.manifest_key, &body).await?;
        if map.manifest == value.manifest && map.chunks() == manifest.chunks.ids.len() {
            let checked = map.check_frames(&manifest.chunks.lens);
            checked.map_err(|error| error.at(layout::owned(Family::Map, value.map_key)))?;
            return Ok((Saved::ruled_now(name.clone(), value.clone(), manifest, map), body));
        }
        Err(Error::damaged("map belongs to another manifest")
            .at(layout::owned(Family::Map, value.map_key))
            .expected(format!("{:.16}, {} chunks", value.manifest, manifest.chunks.ids.len()))
            .got(format!("{:.16}, {} chunks", map.manifest, map.chunks())))
    }

    /// Reads the body of the manifest at `key`, and verifies its id.
    ///
    /// # Errors
    /// As [`Repository::saved_as`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn manifest_body(&self, key: ManifestKey, id: ManifestId) -> Result<bytes::Bytes> {
        let key = layout::owned(Family::Manifest, key);
        let objects = &**self.store().objects();
        let body = objects::body_required(objects, self.budget(), Kind::Manifest, &key).await?;
        let got = ManifestId::of(&body);
        if got == id {
            return Ok(body);
        }
        Err(Error::damaged("manifest does not match its name").at(key).expected(id).got(got))
    }

    /// Reads the map at `key`.
    ///
    /// # Errors
    /// As [`Repository::saved_as`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn map(&self, key: MapKey) -> Result<Map> {
        let key = layout::owned(Family::Map, key);
        let (version, body) =
            objects::versioned_body_required(&**self.store().objects(), self.budget(), Kind::Map, &key).await?;
        let decode = |body: &[u8], memory| Map::decode_within(version, body, memory);
        objects::decode(self.budget(), &body, decode).await.map_err(|error| error.at(key))
    }

    /// Reads the manifest at `key`, and verifies its id.
    ///
    /// # Errors
    /// As [`Repository::saved_as`]; exhausted, if it does not fit the memory budget.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn manifest(&self, key: ManifestKey, id: ManifestId) -> Result<Manifest> {
        let body = self.manifest_body(key, id).await?;
        self.decoded(key, &body).await
    }

    async fn decoded(&self, key: ManifestKey, body: &[u8]) -> Result<Manifest> {
        let decoded = objects::decode(self.budget(), body, Manifest::decode_within).await;
        decoded.map_err(|error| error.at(layout::owned(Family::Manifest, key)))
    }
}

impl Saved {
    /// The tree of `value`, on which the policy was just asked, or need not be.
    pub(crate) fn ruled_now(name: Name, value: RefValue, manifest: Manifest, map: Map) -> Self {
        Self { name, value, manifest, map, rulings: LastRulings::default() }
    }

    /// Approximate bytes of memory.
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.manifest.weight() + self.map.weight()
    }

    /// Wraps the tree in an [`Arc`], to share it between tasks.
    #[must_use]
    pub fn shared(self) -> Arc<Self> {
        Arc::new(self)
    }
}
