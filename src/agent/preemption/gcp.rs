//! Google Compute Engine: notice up to 30 seconds before a Spot VM is preempted
//! (<https://cloud.google.com/compute/docs/instances/preemptible#preemption-detection>).

use hyper::{Method, StatusCode};

use super::Notice;
use super::metadata::{Metadata, unexpected};
use crate::error::Result;

const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";

pub(super) async fn ask(metadata: &Metadata) -> Result<Option<Notice>> {
    let (status, body) = metadata.ask(Method::GET, PREEMPTED, &[("metadata-flavor", "Google")]).await?;
    if status != StatusCode::OK {
        return Err(unexpected(PREEMPTED, status));
    }
    let preempted = body.trim().eq_ignore_ascii_case("true");
    Ok(preempted.then(|| Notice { what: "gcp: preempted".to_owned(), at: None }))
}
