//! Whole-object requests with bounded retries: what the log, index and manifests are read and written with.

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

use crate::budget::Budget;
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{Kind, open, read_header};
use crate::limits::MIB;

/// Tries of a request that may pass when repeated.
const TRIES: u32 = 6;
/// The first pause between two tries; doubled each time.
const PAUSE: Duration = Duration::from_millis(50);
/// Objects longer than this are uploaded in parts.
const SINGLE_PUT_MAX: usize = 128 << 20;
/// Bytes in one part of a multipart upload.
const PART: usize = 32 << 20;

/// Repeats `attempt` while its error is one that may pass. Only for requests that can be repeated.
pub(crate) async fn retry<T, F: Future<Output = Result<T>>>(mut attempt: impl FnMut() -> F) -> Result<T> {
    let mut pause = PAUSE;
    for _ in 1..TRIES {
        match attempt().await {
            Err(error) if error.kind() == ErrorKind::Unreachable => {
                tracing::debug!("retrying: {error:?}");
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            settled => return settled,
        }
    }
    attempt().await
}

/// The object of `kind` at `key`, or `None`. What is longer than any of its kind is refused before its bytes are fetched.
pub(crate) async fn get(objects: &dyn ObjectStore, kind: Kind, key: &Path) -> Result<Option<Bytes>> {
    let found = retry(|| async {
        let result = objects.get(key).await?;
        let expected = checked_len(kind, key, result.meta.size)?;
        whole(key, expected, result.bytes().await?)
    });
    found_or_none(found.await)
}

/// The body of the object of `kind` at `key`, or `None`. Its lengths, stored and plain, are charged to `budget` before it is
/// fetched and before it is decompressed.
pub(crate) async fn body(objects: &dyn ObjectStore, budget: &Budget, kind: Kind, key: &Path) -> Result<Option<Bytes>> {
    let at = |error: Error| error.at(key);
    let found = retry(|| async {
        let result = objects.get(key).await?;
        let expected = checked_len(kind, key, result.meta.size)?;
        let _charge = budget.charge(expected).await.map_err(at)?;
        whole(key, expected, result.bytes().await?)
    });
    let Some(object) = found_or_none(found.await)? else { return Ok(None) };
    let (_, plain_len) = read_header(kind, &object).map_err(at)?;
    let _charge = budget.charge(plain_len.saturating_add(object.len() as u64)).await.map_err(at)?;
    open(kind, &object).map(Some).map_err(at)
}

/// As [`body`], of an object that must be there.
pub(crate) async fn body_required(objects: &dyn ObjectStore, budget: &Budget, kind: Kind, key: &Path) -> Result<Bytes> {
    body(objects, budget, kind, key).await?.ok_or_else(|| gone(key))
}

/// What `decode` makes of `body`. How much memory that takes shows only when it is decoded, so each try is charged with what
/// it may take, and fails when that is too little: the last try has all of the budget.
pub(crate) async fn decode<T>(budget: &Budget, body: &[u8], decode: impl Fn(&[u8], u64) -> Result<T>) -> Result<T> {
    let len = body.len() as u64;
    let most = budget.total().saturating_sub(len);
    let mut room = len.saturating_mul(4).max(MIB).min(most);
    loop {
        let charge = budget.charge(len.saturating_add(room)).await?;
        match decode(body, room) {
            Err(error) if error.kind() == ErrorKind::Exhausted && room < most => {}
            decoded => return decoded,
        }
        drop(charge);
        room = room.saturating_mul(4).min(most);
    }
}

/// Writes the object at `key`, which must be of `len` bytes, over the file at `path`.
pub(crate) async fn download(objects: &dyn ObjectStore, key: &Path, len: u64, path: &std::path::Path) -> Result<()> {
    let failed = |source| Error::io("write to the local cache", path, source);
    let result = objects.get(key).await?;
    if result.meta.size != len {
        return Err(Error::damaged("object has another length than the log says")
            .at(key)
            .expected(len)
            .got(result.meta.size));
    }
    let mut file = tokio::fs::File::create(path).await.map_err(failed)?;
    let (mut stream, mut written) = (result.into_stream(), 0);
    while let Some(part) = stream.try_next().await? {
        written += part.len() as u64;
        if written > len {
            return Err(short(key, len, "more"));
        }
        tokio::io::AsyncWriteExt::write_all(&mut file, &part).await.map_err(failed)?;
    }
    tokio::io::AsyncWriteExt::flush(&mut file).await.map_err(failed)?;
    if written == len { Ok(()) } else { Err(short(key, len, written)) }
}

fn found_or_none<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The object of `kind` at `key`, which must be there.
pub(crate) async fn get_required(objects: &dyn ObjectStore, kind: Kind, key: &Path) -> Result<Bytes> {
    get(objects, kind, key).await?.ok_or_else(|| gone(key))
}

/// No object is at `key`.
pub(crate) fn gone(key: &Path) -> Error {
    Error::not_found("object is gone").at(key)
}

/// `len`, if an object of `kind` may be that long.
pub(crate) fn checked_len(kind: Kind, key: &Path, len: u64) -> Result<u64> {
    let most = kind.object_len_max();
    if len <= most {
        return Ok(len);
    }
    Err(Error::damaged("object is longer than any of its kind")
        .at(key)
        .expected(format!("at most {most} bytes"))
        .got(len)
        .help("it is not Towline's, or was made to exhaust memory: look who may write there"))
}

/// Asks for bytes `range` of the object at `key`; a local file comes as a file, to be read where blocking is fine.
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

/// Reads a body that must be as long as `out`.
pub(crate) async fn drain(
    mut stream: BoxStream<'static, object_store::Result<Bytes>>,
    key: &Path,
    out: &mut [u8],
) -> Result<()> {
    let mut filled = 0;
    while let Some(part) = stream.try_next().await? {
        let room = out.get_mut(filled..filled + part.len());
        room.ok_or_else(|| short(key, "less", "more"))?.copy_from_slice(&part);
        filled += part.len();
    }
    if filled == out.len() { Ok(()) } else { Err(short(key, out.len(), filled)) }
}

/// Reads a local object's bytes from `start` on. Too short a file is damage: nobody else is in between.
pub(crate) fn read_file(file: &File, path: &std::path::Path, start: u64, out: &mut [u8]) -> Result<()> {
    let len = out.len() as u64;
    file.read_exact_at(out, start).map_err(|source| {
        if source.kind() == std::io::ErrorKind::UnexpectedEof {
            let got = file.metadata().map_or(0, |meta| meta.len());
            return Error::damaged("object is shorter than it was").at(path.display()).expected(start + len).got(got);
        }
        Error::io("read object", path, source)
    })
}

/// Reads bytes from `start` on, as many as `out` is long, with retries; returns the length of the whole object.
pub(crate) async fn read_range(objects: &dyn ObjectStore, key: &Path, start: u64, out: &mut [u8]) -> Result<u64> {
    let range = start..start + out.len() as u64;
    let mut pause = PAUSE;
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
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            settled => return settled,
        }
    }
}

/// The length of the object at `key`, without its bytes.
pub(crate) async fn len(objects: &dyn ObjectStore, key: &Path) -> Result<u64> {
    retry(|| async { Ok(objects.head(key).await?.size) }).await
}

/// Whether there is an object at `key`.
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

/// A body of another length than announced: the connection's fault until repeated tries say otherwise.
fn short(key: &Path, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Error {
    Error::unreachable("store sent a body of another length").at(key).expected(expected).got(got)
}

/// Writes an object whose key was never used before. Repeating it is harmless: only this writer knows the key.
pub(crate) async fn put(objects: &dyn ObjectStore, key: &Path, payload: PutPayload) -> Result<()> {
    let written = if payload.content_length() > SINGLE_PUT_MAX {
        retry(|| put_parts(objects, key, payload.clone())).await
    } else {
        retry(|| async { Ok(objects.put(key, payload.clone()).await.map(drop)?) }).await
    };
    written.map_err(|error| placed(objects, key, error))
}

/// Says where a write failed, if the store did not.
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
    /// The store says this request made it.
    Yes,
    /// The store says it exists: perhaps by an earlier try of this very request.
    Exists,
    /// The answer was lost, or says nothing: look.
    Unknown,
}

/// Creates an object that must not exist, in one request, not repeated.
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
