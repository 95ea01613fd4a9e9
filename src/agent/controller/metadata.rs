//! Metadata of watched objects: the fields that count here. One field of one object that cannot be read, such as a time of the year
//! 10000 among `managedFields`, which authors choose, would fail the list of all.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::core::ObjectMeta;
use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    creation_timestamp: Option<String>,
    deletion_timestamp: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

/// Reads metadata, for `deserialize_with`.
///
/// # Errors
/// Malformed names, versions, labels or annotations. Times that cannot be read are none, or long ago if they say that an object is being
/// deleted.
pub(in crate::agent) fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let found = Metadata::deserialize(deserializer)?;
    let time = |text: String| text.parse::<Timestamp>().ok();
    Ok(ObjectMeta {
        name: found.name,
        namespace: found.namespace,
        uid: found.uid,
        resource_version: found.resource_version,
        generation: found.generation,
        creation_timestamp: found.creation_timestamp.and_then(time).map(Time),
        deletion_timestamp: found.deletion_timestamp.map(|text| Time(time(text).unwrap_or(Timestamp::UNIX_EPOCH))),
        labels: found.labels,
        annotations: found.annotations,
        ..ObjectMeta::default()
    })
}
