//! Requests for whole objects with bounded retries, used for the log, the index and manifests.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt as _;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, GetResult, GetResultPayload, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload,
};
use tokio::io::AsyncWriteExt as _;

use crate::backoff::Backoff;
use crate::budget::{Budget, Charge};
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{Kind, open, read_header, version};
use crate::limits::MIB;

/// Maximum tries of a request after temporary errors.
const TRIES: u32 = 6;
/// Pauses between tries.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
/// Maximum bytes of an object that is uploaded in one request.
const SINGLE_PUT_MAX: usize = 128 << 20;
/// Bytes in one part of a multipart upload.
const PART: usize = 32 << 20;

/// Repeats `attempt` after temporary errors. Only for requests that are safe to repeat.
pub(crate) async fn retry<T, F: Future<Output = Result<T>>>(mut attempt: impl FnMut() -> F) -> Result<T> {
    let mut backoff = BACKOFF;
    for _ in 1..TRIES {
        match attempt().await {
            Err(error) if error.kind() == ErrorKind::Unreachable => {
                tracing::debug!("retrying: {error:?}");
                tokio::time::sleep(backoff.pause()).await;
            }
            settled => return settled,
        }
    }
    attempt().await
}

/// Reads, and once more if the first answer is `doubtful`: one bad answer of the store must not cost an intact object.
///
/// # Cancel safety
/// Safe, if `read` only reads.
pub(crate) async fn twice_if<T, F: Future<Output = Result<T>>>(
    doubtful: impl Fn(&Result<T>) -> bool,
    read: impl Fn() -> F,
) -> Result<T> {
    let first = read().await;
    if doubtful(&first) { read().await } else { first }
}

/// Reads the object of `kind` at `key`, or `None`. One longer than the maximum of its kind is refused before it is fetched.
pub(crate) async fn get(objects: &dyn ObjectStore, kind: Kind, key: &Path) -> Result<Option<Bytes>> {
    let found = retry(|| async {
        let result = objects.get(key).await?;
        let expected = checked_len(kind, key, result.meta.size)?;
        whole(key, expected, result.bytes().await?)
    });
    found_or_none(found.await)
}

/// Reads and decompresses the object of `kind` at `key`, or `None`. Its stored length is charged to `budget` before the fetch,
/// and its plain length before the decompression.
pub(crate) async fn body(objects: &dyn ObjectStore, budget: &Budget, kind: Kind, key: &Path) -> Result<Option<Bytes>> {
    match sealed(objects, budget, kind, key).await? {
        Some(object) => unseal(budget, kind, key, &object).await.map(Some),
        None => Ok(None),
    }
}

/// Reads the object of `kind` at `key` as stored, or `None`. Its length is charged to `budget` during the fetch.
pub(crate) async fn sealed(
    objects: &dyn ObjectStore,
    budget: &Budget,
    kind: Kind,
    key: &Path,
) -> Result<Option<Bytes>> {
    match sealed_within(objects, budget, kind, key, u64::MAX).await? {
        Sealed::Object(object) => Ok(Some(object)),
        Sealed::Absent | Sealed::Longer => Ok(None),
    }
}

/// Outcome of [`sealed_within`].
#[derive(Debug)]
pub(crate) enum Sealed {
    /// The object.
    Object(Bytes),
    /// There is none.
    Absent,
    /// It is longer than asked for, and was not fetched.
    Longer,
}

/// As [`sealed`], but fetches no object of more than `most` bytes.
pub(crate) async fn sealed_within(
    objects: &dyn ObjectStore,
    budget: &Budget,
    kind: Kind,
    key: &Path,
    most: u64,
) -> Result<Sealed> {
    let found = retry(|| async {
        let result = objects.get(key).await?;
        let expected = checked_len(kind, key, result.meta.size)?;
        if expected > most {
            return Ok(Sealed::Longer);
        }
        let _charge = budget.charge(expected).await.map_err(|error| error.at(key))?;
        whole(key, expected, result.bytes().await?).map(Sealed::Object)
    });
    Ok(found_or_none(found.await)?.unwrap_or(Sealed::Absent))
}

/// Decompresses the body of `object`, of `kind` at `key`. Its length is charged to `budget` during that.
pub(crate) async fn unseal(budget: &Budget, kind: Kind, key: &Path, object: &Bytes) -> Result<Bytes> {
    let at = |error: Error| error.at(key);
    let (_, plain_len) = read_header(kind, object).map_err(at)?;
    let _charge = budget.charge(plain_len.saturating_add(object.len() as u64)).await.map_err(at)?;
    open(kind, object).map_err(at)
}

/// As [`body`], for an object that must exist.
pub(crate) async fn body_required(objects: &dyn ObjectStore, budget: &Budget, kind: Kind, key: &Path) -> Result<Bytes> {
    body(objects, budget, kind, key).await?.ok_or_else(|| gone(key))
}

/// As [`body_required`]; also returns the version of the format that it is written in.
pub(crate) async fn versioned_body_required(
    objects: &dyn ObjectStore,
    budget: &Budget,
    kind: Kind,
    key: &Path,
) -> Result<(u8, Bytes)> {
    let object = sealed(objects, budget, kind, key).await?.ok_or_else(|| gone(key))?;
    Ok((version(&object), unseal(budget, kind, key, &object).await?))
}

/// Decodes `body`. The memory needed is only known by decoding, so each try reserves more memory and fails if it is too little;
/// the last try has all of the budget.
pub(crate) async fn decode<T>(budget: &Budget, body: &[u8], decode: impl Fn(&[u8], u64) -> Result<T>) -> Result<T> {
    decode_held(budget, budget.total(), body, decode).await.map(|(decoded, _)| decoded)
}

/// As [`decode`], with at most `most` bytes of memory together with the body, which stay reserved until the charge is dropped.
pub(crate) async fn decode_held<T>(
    budget: &Budget,
    most: u64,
    body: &[u8],
    decode: impl Fn(&[u8], u64) -> Result<T>,
) -> Result<(T, Charge)> {
    let len = body.len() as u64;
    let most = most.saturating_sub(len);
    let mut memory = len.saturating_mul(4).max(MIB).min(most);
    loop {
        let charge = budget.charge(len.saturating_add(memory)).await?;
        match decode(body, memory) {
            Err(error) if error.kind() == ErrorKind::Exhausted && memory < most => {}
            decoded => return decoded.map(|decoded| (decoded, charge)),
        }
        drop(charge);
        memory = memory.saturating_mul(4).min(most);
    }
}

/// Outcome of a [`download`] whose store answered.
#[derive(Debug)]
pub(crate) enum Downloaded {
    /// The file is complete.
    Whole,
    /// The file cannot be written.
    NotWritable(std::io::Error),
}

/// Writes the object at `key`, which must be of `len` bytes, over the file at `path`.
pub(crate) async fn download(
    objects: &dyn ObjectStore,
    key: &Path,
    len: u64,
    path: &std::path::Path,
) -> Result<Downloaded> {
    let result = objects.get(key).await?;
    if result.meta.size != len {
        return Err(Error::damaged("object has another length than the log says")
            .at(key)
            .expected(len)
            .got(result.meta.size));
    }
    let mut file = match tokio::fs::File::create(path).await {
        Ok(file) => file,
        Err(error) => return Ok(Downloaded::NotWritable(error)),
    };
    let (mut stream, mut written) = (result.into_stream(), 0);
    while let Some(part) = stream.try_next().await? {
        written += part.len() as u64;
        if written > len {
            return Err(short(key, len, "more"));
        }
        if let Err(error) = file.write_all(&part).await {
            return Ok(Downloaded::NotWritable(error));
        }
    }
    if let Err(error) = file.flush().await {
        return Ok(Downloaded::NotWritable(error));
    }
    if written == len { Ok(Downloaded::Whole) } else { Err(short(key, len, written)) }
}

fn found_or_none<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the object of `kind` at `key`, which must exist.
pub(crate) async fn get_required(objects: &dyn ObjectStore, kind: Kind, key: &Path) -> Result<Bytes> {
    get(objects, kind, key).await?.ok_or_else(|| gone(key))
}

/// Error: there is no object at `key`.
pub(crate) fn gone(key: &Path) -> Error {
    Error::not_found("object is gone").at(key)
}

/// Returns `len` if an object of `kind` may be that long.
pub(crate) fn checked_len(kind: Kind, key: &Path, len: u64) -> Result<u64> {
    let most = kind.object_len_max();
    if len <= most {
        return Ok(len);
    }
    Err(Error::damaged("object is longer than any of its kind")
        .at(key)
        .expected(format!("at most {most} bytes"))
        .got(len)
        .help("it is not Towline's, or was made to exhaust memory: check who may write there"))
}

/// Requests bytes `range` of the object at `key`. A local object is returned as a file, to be read on a blocking thread.
pub(crate) async fn get_range(objects: &dyn ObjectStore, key: &Path, range: Range<u64>) -> Result<GetResult> {
    let end = range.end;
    let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
    let result = objects.get_opts(key, options).await?;
    if result.meta.size < end {
        let error = Error::damaged("object is shorter than it was").at(key);
        return Err(error.expected(format!("at least {end} bytes")).got(result.meta.size));
    }
    Ok(result)
}

/// Reads a body that must have the length of `out`.
pub(crate) async fn drain(
    mut stream: BoxStream<'static, object_store::Result<Bytes>>,
    key: &Path,
    out: &mut [u8],
) -> Result<()> {
    let mut filled = 0;
    while let Some(part) = stream.try_next().await? {
        let slot = out.get_mut(filled..filled + part.len());
        slot.ok_or_else(|| short(key, "less", "more"))?.copy_from_slice(&part);
        filled += part.len();
    }
    if filled == out.len() { Ok(()) } else { Err(short(key, out.len(), filled)) }
}

/// Reads a local object's bytes from `start` on. A file that is too short is damaged, as there is no network to break off.
pub(crate) fn read_file(file: &File, path: &std::path::Path, start: u64, out: &mut [u8]) -> Result<()> {
    let len = out.len() as u64;
    file.read_exact_at(out, start).map_err(|source| {
        if source.kind() == std::io::ErrorKind::UnexpectedEof {
            let got = file.metadata().map_or(0, |meta| meta.len());
            return Error::damaged("object is shorter than it was").at(path.display()).expected(start + len).got(got);
        }
        Error::io("cannot read an object", path, source)
    })
}

/// Fills `out` with bytes from `start` on, with retries; returns the length of the object.
pub(crate) async fn read_range(objects: &dyn ObjectStore, key: &Path, start: u64, out: &mut [u8]) -> Result<u64> {
    let range = start..start + out.len() as u64;
    let mut backoff = BACKOFF;
    let mut tries = 0;
    loop {
        tries += 1;
        let attempt = async {
            let result = get_range(objects, key, range.clone()).await?;
            match result.payload {
                GetResultPayload::File(file, path) => read_file(&file, &path, start, out)?,
                GetResultPayload::Stream(stream) => drain(stream, key, out).await?,
            }
            Ok::<_, Error>(result.meta.size)
        };
        match attempt.await {
            Err(error) if error.kind() == ErrorKind::Unreachable && tries < TRIES => {
                tokio::time::sleep(backoff.pause()).await;
            }
            settled => return settled,
        }
    }
}

/// Length of the object at `key`, by a request without a body.
pub(crate) async fn len(objects: &dyn ObjectStore, key: &Path) -> Result<u64> {
    retry(|| async { Ok(objects.head(key).await?.size) }).await
}

/// True if there is an object at `key`.
pub(crate) async fn exists(objects: &dyn ObjectStore, key: &Path) -> Result<bool> {
    match len(objects, key).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn whole(key: &Path, expected: u64, bytes: Bytes) -> Result<Bytes> {
    if bytes.len() as u64 == expected { Ok(bytes) } else { Err(short(key, expected, bytes.len())) }
}

/// Error for a body of another length than announced, which counts as a connection error and is retried.
fn short(key: &Path, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Error {
    Error::unreachable("store sent a body of another length").at(key).expected(expected).got(got)
}

/// Writes an object under a new key that only this writer knows, so that the request is safe to repeat.
pub(crate) async fn put(objects: &dyn ObjectStore, key: &Path, payload: PutPayload) -> Result<()> {
    let written = if payload.content_length() > SINGLE_PUT_MAX {
        retry(|| put_parts(objects, key, payload.clone())).await
    } else {
        retry(|| async { Ok(objects.put(key, payload.clone()).await.map(drop)?) }).await
    };
    written.map_err(|error| placed(objects, key, error))
}

/// Adds the location to the error of a write, if the store gave none.
fn placed(objects: &dyn ObjectStore, key: &Path, error: Error) -> Error {
    if error.place().is_some() { error } else { error.at(format!("{objects}/{key}")) }
}

async fn put_parts(objects: &dyn ObjectStore, key: &Path, payload: PutPayload) -> Result<()> {
    let whole: Bytes = payload.into();
    let mut upload = objects.put_multipart(key).await?;
    let parts = async {
        for start in (0..whole.len()).step_by(PART) {
            let part = whole.slice(start..(start + PART).min(whole.len()));
            upload.put_part(part.into()).await?;
        }
        upload.complete().await
    };
    match parts.await {
        Ok(_) => Ok(()),
        Err(error) => {
            if let Err(left) = upload.abort().await {
                tracing::debug!("a multipart upload of {key} is left to the collector: {left}");
            }
            Err(error.into())
        }
    }
}

/// Outcome of a create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Created {
    /// This request created it.
    Yes,
    /// It exists, possibly from an earlier try of this request.
    Exists,
    /// The answer was lost or is inconclusive: read the object to find out.
    Unknown,
}

/// Creates an object that must not exist, in one request without retries.
pub(crate) async fn create(objects: &dyn ObjectStore, key: &Path, body: Bytes) -> Result<Created> {
    match objects.put_opts(key, body.into(), PutMode::Create.into()).await.map_err(Error::from) {
        Ok(_) => Ok(Created::Yes),
        Err(error) => match error.kind() {
            ErrorKind::Conflict => Ok(Created::Exists),
            ErrorKind::Unreachable => {
                tracing::debug!("create of {key}: {error:?}");
                Ok(Created::Unknown)
            }
            _ => Err(placed(objects, key, error)),
        },
    }
}
