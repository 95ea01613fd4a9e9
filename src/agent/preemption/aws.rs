//! Amazon EC2: notice two minutes before a spot instance is interrupted
//! (<https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html>). Requests use a session token
//! (`IMDSv2`).

use hyper::{Method, StatusCode};
use serde::Deserialize;

use super::Notice;
use super::metadata::{Metadata, unexpected};
use crate::error::{Error, Result};

const TOKEN: &str = "/latest/api/token";
const ACTION: &str = "/latest/meta-data/spot/instance-action";

/// Planned action on the instance.
#[derive(Debug, Deserialize)]
struct Action {
    action: String,
    time: String,
}

pub(super) async fn ask(metadata: &Metadata) -> Result<Option<Notice>> {
    let lasting = [("x-aws-ec2-metadata-token-ttl-seconds", "60")];
    let (status, token) = metadata.ask(Method::PUT, TOKEN, &lasting).await?;
    if !status.is_success() {
        return Err(unexpected(TOKEN, status));
    }
    let (status, body) = metadata.ask(Method::GET, ACTION, &[("x-aws-ec2-metadata-token", &token)]).await?;
    match status {
        // No action is planned.
        StatusCode::NOT_FOUND => Ok(None),
        StatusCode::OK => read(&body).map(Some),
        _ => Err(unexpected(ACTION, status)),
    }
}

fn read(body: &str) -> Result<Notice> {
    let action: Action = serde_json::from_str(body)
        .map_err(|source| Error::other("cannot parse the metadata service's response").at(ACTION).source(source))?;
    let at = humantime::parse_rfc3339(&action.time).ok().map(Into::into);
    Ok(Notice { what: format!("aws: {} at {}", action.action, action.time), at })
}
