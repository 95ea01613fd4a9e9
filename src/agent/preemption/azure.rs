//! Microsoft Azure: notice at least 30 seconds before a Spot VM is evicted
//! (<https://learn.microsoft.com/en-us/azure/virtual-machines/linux/scheduled-events>). Events list the affected machines,
//! which may be other members of the same set.

use hyper::{Method, StatusCode};
use serde::Deserialize;

use super::Notice;
use super::metadata::{Metadata, unexpected};
use crate::error::{Error, Result};

const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
/// Required header; requests without it are refused.
const HEADERS: [(&str, &str); 1] = [("metadata", "true")];

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Scheduled {
    #[serde(default)]
    events: Vec<Planned>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Planned {
    event_type: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    not_before: String,
}

pub(super) async fn ask(metadata: &Metadata) -> Result<Option<Notice>> {
    let (status, body) = metadata.ask(Method::GET, EVENTS, &HEADERS).await?;
    if status != StatusCode::OK {
        return Err(unexpected(EVENTS, status));
    }
    let scheduled: Scheduled = serde_json::from_str(&body)
        .map_err(|source| Error::other("cannot parse the metadata service's response").at(EVENTS).source(source))?;
    let ends = |event: &&Planned| ["Preempt", "Terminate"].contains(&event.event_type.as_str());
    if !scheduled.events.iter().any(|event| ends(&event)) {
        return Ok(None);
    }
    let (status, name) = metadata.ask(Method::GET, NAME, &HEADERS).await?;
    if status != StatusCode::OK {
        return Err(unexpected(NAME, status));
    }
    let ours = |event: &&Planned| event.resources.iter().any(|resource| resource == name.trim());
    Ok(scheduled.events.iter().filter(ends).find(ours).map(|event| {
        // A started event has no time: `NotBefore` is empty.
        let at = chrono::DateTime::parse_from_rfc2822(&event.not_before).ok();
        let at = at.and_then(|at| at.timestamp_nanos_opt()).map(crate::clock::Timestamp);
        Notice { what: format!("azure: {} {}", event.event_type, event.not_before).trim_end().to_owned(), at }
    }))
}
