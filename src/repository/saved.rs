//! A saved tree, opened: its manifest and its map. Reading it costs as much as the tree is large, not the repository.

use std::sync::Arc;

use super::layout::{self, Family};
use super::log::RefValue;
use super::missing::no_such_name;
use super::{Name, Repository, objects};
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::Kind;
use crate::format::{Manifest, Map};
use crate::id::{ManifestId, ManifestKey, MapKey};

/// Readings of a name that keeps moving before giving up.
const ATTEMPTS: usize = 5;

/// Opened value of a name.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The name.
    pub name: Name,
    /// Its value in the log.
    pub value: RefValue,
    /// The tree.
    pub manifest: Manifest,
    /// Places of its chunks.
    pub map: Map,
}

impl Repository {
    /// Opens what `name` stands for now.
    ///
    /// # Errors
    /// Not found, if there is no such name; damaged, if its manifest or map is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn saved(&self, name: &Name) -> Result<Saved> {
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let state = self.state().await?;
            let missing = || no_such_name(&state.refs, name, self.store().location());
            let value = state.refs.get(name).ok_or_else(missing)?.clone();
            match self.saved_as(name, &value).await {
                // Replaced or repacked between the two readings: the name tells the new keys.
                Err(error) if error.kind() == ErrorKind::NotFound && last.as_ref() != Some(&value) => {
                    last = Some(value);
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Err(Error::damaged("a saved tree's manifest or map is missing").at(name).source(error));
                }
                settled => return settled,
            }
        }
        Err(Error::conflict("name moves faster than it can be read").at(name).help("try again"))
    }

    /// Opens one value of a name.
    ///
    /// # Errors
    /// Not found, if its objects are gone; damaged, if they are.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn saved_as(&self, name: &Name, value: &RefValue) -> Result<Saved> {
        Ok(self.saved_verbatim(name, value).await?.0)
    }

    /// Opens one value of a name, with the manifest's body as it is stored.
    ///
    /// # Errors
    /// As [`Repository::saved_as`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn saved_verbatim(&self, name: &Name, value: &RefValue) -> Result<(Saved, bytes::Bytes)> {
        let body = self.manifest_body(value.manifest_key, value.manifest);
        let (body, map) = futures::try_join!(body, self.map(value.map_key))?;
        let manifest = self.decoded(value.manifest_key, &body).await?;
        if map.manifest == value.manifest && map.chunks() == manifest.chunks.ids.len() {
            return Ok((Saved { name: name.clone(), value: value.clone(), manifest, map }, body));
        }
        Err(Error::damaged("map belongs to another manifest")
            .at(layout::owned(Family::Map, value.map_key))
            .expected(format!("{:.16}, {} chunks", value.manifest, manifest.chunks.ids.len()))
            .got(format!("{:.16}, {} chunks", map.manifest, map.chunks())))
    }

    /// The body of the manifest at `key`, checked against its name.
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

    /// The map at `key`.
    ///
    /// # Errors
    /// As [`Repository::saved_as`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn map(&self, key: MapKey) -> Result<Map> {
        let key = layout::owned(Family::Map, key);
        let body = objects::body_required(&**self.store().objects(), self.budget(), Kind::Map, &key).await?;
        objects::decode(self.budget(), &body, Map::decode_within).await.map_err(|error| error.at(key))
    }

    /// The manifest at `key`, checked against its name.
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
    /// Shares it among the tasks of an operation.
    #[must_use]
    pub fn shared(self) -> Arc<Self> {
        Arc::new(self)
    }
}
