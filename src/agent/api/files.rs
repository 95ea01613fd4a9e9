//! Files over HTTP, whole or in ranges, and lists of folders (<https://www.rfc-editor.org/rfc/rfc9110#section-14>).

#![expect(unused_qualifications, reason = "utoipa names the parameters' types so")]

use std::ops::Range;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use futures::stream::unfold;
use serde::Deserialize;
use utoipa::IntoParams;

use super::caller::Caller;
use super::error::{ApiError, parse_query};
use super::names::bounded;
use super::recorded::{AccessRequest, check_read};
use crate::agent::files::{File, TreeNode};
use crate::agent::state::AgentState;
use crate::agent::view;
use crate::audit::{Action, Repeats, Request};
use crate::error::{Error, Result};
use crate::selector::Selector;
use crate::size::ByteRange;

/// Prefix of the paths of files.
const BELOW: &str = "/v1/files/";

/// Repository of the file; of a folder, the page of the list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FileQuery {
    /// The repository, if not the default one.
    repository: Option<String>,
    /// Of a folder: only entries after this name, percent-escaped: `next` of the answer before.
    after: Option<String>,
    /// Of a folder: entries in the answer, at most.
    #[param(minimum = 1, maximum = 10000, default = 1000)]
    limit: Option<usize>,
}

/// Part of a file to send.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Whole,
    Of(Range<u64>),
    Nothing,
}

/// Lists the top folder of a saved tree.
#[utoipa::path(
    get,
    path = "/v1/files/{reference}/",
    operation_id = "listFiles",
    params(("reference" = String, Path, description = "A name, or RUN@CHOICE; its slashes are written %2F"), FileQuery),
    responses((status = 200, description = "In the order of names; with `next` if there are more", body = view::Folder)),
)]
pub(super) async fn top(
    state: State<Arc<AgentState>>,
    caller: Extension<Caller>,
    method: Method,
    uri: Uri,
    which: Result<Query<FileQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    file(state, caller, method, uri, which, headers).await
}

/// Reads a saved file, or a range of it, every byte checked; or lists a folder.
#[utoipa::path(
    get,
    path = "/v1/files/{reference}/{*path}",
    operation_id = "readFile",
    params(
        ("reference" = String, Path, description = "A name, or RUN@CHOICE; its slashes are written %2F"),
        ("path" = String, Path, description = "Path of a file or folder in the saved tree; it may hold slashes"),
        FileQuery,
        ("Range" = Option<String>, Header, description = "`bytes=A-B`, `bytes=A-` or `bytes=-N`"),
        ("If-Range" = Option<String>, Header, description = "The range is wanted only of this ETag"),
        ("If-None-Match" = Option<String>, Header, description = "Nothing is wanted if it has this ETag"),
    ),
    responses(
        (status = 200, description = "All of it; of a folder, a list", content(
            (String = "application/octet-stream"),
            (view::Folder = "application/json"),
        )),
        (status = 206, description = "The range", body = String, content_type = "application/octet-stream"),
        (status = 304, description = "It has the ETag"),
        (status = 416, description = "The range lies outside the file"),
    ),
)]
pub(super) async fn file(
    State(state): State<Arc<AgentState>>,
    Extension(caller): Extension<Caller>,
    method: Method,
    uri: Uri,
    which: Result<Query<FileQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let FileQuery { repository, after, limit } = parse_query(which)?;
    let (selector, path) = target(uri.path())?;
    caller.check_repository_name(repository.as_deref())?;
    let served = state.repository(repository.as_deref())?;
    let asked =
        AccessRequest { caller: &caller, action: Action::Read, repository: Some(served), repeats: Repeats::Merged };
    let read_by = served.for_caller(caller.local());
    let node = match TreeNode::open(&state, &read_by, caller.grant(), &selector, path).await {
        Ok(node) => node,
        Err(error) => return Err(asked.refuse(&state, &selector, error).await.into()),
    };
    check_read(&state, &caller, node.name())?;
    let request = asked.allow(&state, node.name()).await?;
    let file = match node {
        TreeNode::File(file) => file,
        TreeNode::Folder(folder) => {
            let malformed = || Error::usage("`after` has a malformed percent escape");
            let after = after.map(|after| unescaped(&after).ok_or_else(malformed)).transpose()?;
            return Ok(Json(folder.list(after.as_deref(), bounded(limit)?)).into_response());
        }
    };
    if after.is_some() || limit.is_some() {
        return Err(Error::usage("`after` and `limit` are for folders, and this is a file").at(uri.path()).into());
    }
    let (len, tag) = (file.len()?, file.tag());
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let mut response = if text(header::IF_NONE_MATCH).is_some_and(|tags| names(tags, &tag)) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        // A range of the new content does not fit the old content that the client has.
        let fresh = text(header::IF_RANGE).is_none_or(|value| value == tag);
        let part = part(text(header::RANGE).filter(|_| fresh), len);
        answer(file, part, (len, method == Method::HEAD), request)?
    };
    let own = response.headers_mut();
    own.insert(header::ETAG, tag.parse().map_err(|_| Error::other("digest is not a valid header value"))?);
    own.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    Ok(response)
}

fn answer(file: File, part: Part, (len, head): (u64, bool), request: Option<Request>) -> Result<Response> {
    let (status, range) = match part {
        Part::Whole => (StatusCode::OK, 0..len),
        Part::Of(range) => (StatusCode::PARTIAL_CONTENT, range),
        Part::Nothing => {
            let value = [(header::CONTENT_RANGE, format!("bytes */{len}"))];
            return Ok((StatusCode::RANGE_NOT_SATISFIABLE, value).into_response());
        }
    };
    let mut response = (
        status,
        [
            (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
            (header::CONTENT_LENGTH, (range.end - range.start).to_string()),
        ],
    )
        .into_response();
    if status == StatusCode::PARTIAL_CONTENT {
        let value = format!("bytes {}-{}/{len}", range.start, range.end - 1);
        let value = value.parse().map_err(|_| Error::other("range is not a valid header value"))?;
        response.headers_mut().insert(header::CONTENT_RANGE, value);
    }
    if !head && !range.is_empty() {
        let pieces = unfold((file.read(range)?, request), |(mut pieces, request)| async move {
            let piece = pieces.recv().await?;
            if let (Some(request), Ok(piece)) = (&request, &piece) {
                let _ = request.moved(piece.len() as u64);
            }
            Some((piece, (pieces, request)))
        });
        *response.body_mut() = Body::from_stream(pieces);
    }
    Ok(response)
}

/// Part of `len` bytes that the header requests. A malformed range, one in other units or several ranges are ignored, as the
/// standard allows: the status tells the client.
fn part(range: Option<&str>, len: u64) -> Part {
    let asked = range.and_then(|range| range.trim().strip_prefix("bytes="));
    let Some(asked) = asked.and_then(|range| range.trim().parse::<ByteRange>().ok()) else { return Part::Whole };
    let range = match asked {
        ByteRange::Between(first, last) => first..last.saturating_add(1).min(len),
        ByteRange::From(first) => first..len,
        ByteRange::Last(count) => len.saturating_sub(count)..len,
    };
    if range.is_empty() { Part::Nothing } else { Part::Of(range) }
}

/// True if one of the tags in an `If-None-Match` header is `tag`, by weak comparison.
fn names(tags: &str, tag: &str) -> bool {
    tags.split(',').map(str::trim).any(|one| one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag)
}

/// Name and path of `/v1/files/REF/PATH`. Slashes of the name are escaped as `%2F`, so the first slash ends it.
fn target(path: &str) -> Result<(Selector, Vec<u8>)> {
    let parts = path.strip_prefix(BELOW).and_then(|below| below.split_once('/'));
    let malformed = || Error::usage("path has a malformed percent escape").at(path);
    let (reference, path) = parts.ok_or_else(malformed)?;
    let (reference, path) = unescaped(reference).zip(unescaped(path)).ok_or_else(malformed)?;
    Ok((String::from_utf8_lossy(&reference).parse()?, path))
}

fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut found = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        found.push(if byte == b'%' { digit(bytes.next()?)? << 4 | digit(bytes.next()?)? } else { byte });
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_http() {
        for (asked, expected) in [
            (None, Part::Whole),
            (Some("bytes=0-0"), Part::Of(0..1)),
            (Some("bytes=2-"), Part::Of(2..10)),
            (Some("bytes=2-99"), Part::Of(2..10)),
            (Some("bytes=-3"), Part::Of(7..10)),
            (Some("bytes=-30"), Part::Of(0..10)),
            (Some("bytes=10-"), Part::Nothing),
            (Some("bytes=10-11"), Part::Nothing),
            (Some("bytes=0-1,3-4"), Part::Whole),
            (Some("lines=0-1"), Part::Whole),
            (Some("bytes=5-2"), Part::Whole),
        ] {
            assert_eq!(part(asked, 10), expected, "{asked:?}");
        }
        assert_eq!(part(Some("bytes=0-"), 0), Part::Nothing);
        assert_eq!(part(Some("bytes=-1"), 0), Part::Nothing);
    }

    #[test]
    fn the_first_plain_slash_ends_the_name() {
        let read = |path: &str| target(path).map(|(selector, path)| (selector.to_string(), path));
        assert_eq!(read("/v1/files/a%2Fstep-1/b/c.bin").unwrap(), ("a/step-1".into(), b"b/c.bin".to_vec()));
        assert_eq!(read("/v1/files/run@latest/%ff%2f").unwrap(), ("run@latest".into(), b"\xff/".to_vec()));
        for path in ["/v1/files/a/%zz", "/v1/files/a/%f", "/v1/files/a%40%40/b", "/v1/files//b"] {
            assert!(read(path).is_err(), "{path}");
        }
    }

    #[test]
    fn a_tag_is_found_among_others() {
        assert!(names("\"a\", W/\"b\"", "\"b\"") && names("*", "\"b\""));
        assert!(!names("\"ab\"", "\"b\""));
    }
}
