//! Listings of a bucket, page by page: one whose pages do not get on is an error, not a loop without end.
//!
//! A store that answers with the same continuation token again, or with page after page without a key, would be asked for ever.
//! [`ListingCheck`] finds keys that come again, which every store may list; here are the pages, which only a client of S3 sees.
//! Two answers are kept from `object_store`: a page with a key that is no path, over which it fails, and errors of bulk deletes,
//! over some of which it panics.

use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::{DELIMITER, Path};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

use super::bucket::Bucket;
use super::http::is_not_all_deleted;
use crate::error::Error;

/// Maximum number of pages without a key, one after another, before the listing goes on. Stores make some, where keys that they
/// examined are of deleted objects.
pub(super) const EMPTY_PAGES_MAX: u32 = 64;

/// End of the names of directory buckets (S3 Express One Zone).
const DIRECTORY_BUCKET: &str = "--x-s3";

/// Maximum number of objects that one request deletes.
const DELETED_AT_ONCE: usize = 1000;
/// Such requests at a time.
const DELETES_MAX: usize = 20;

/// A client of S3 whose listings end or fail.
#[derive(Debug)]
pub(super) struct Pages<T> {
    client: Arc<T>,
    /// Sends one request for each object that is deleted.
    singly: Arc<T>,
    bucket: Bucket,
}

impl<T: ObjectStore + PaginatedListStore> Pages<T> {
    /// Checks the listings of `client`, of the bucket `bucket`. `singly` deletes with one request for each object.
    pub(super) fn new(client: T, singly: T, bucket: Bucket) -> Self {
        Self { client: Arc::new(client), singly: Arc::new(singly), bucket }
    }

    /// Pages of keys below `prefix`, after `offset`.
    fn pages(
        &self,
        prefix: Option<&Path>,
        offset: Option<&Path>,
        delimiter: bool,
    ) -> BoxStream<'static, Result<ListResult>> {
        let prefix = prefix.filter(|prefix| !prefix.as_ref().is_empty());
        let walk = Walk {
            client: Arc::clone(&self.client),
            bucket: self.bucket.clone(),
            prefix: prefix.map(|prefix| format!("{prefix}{DELIMITER}")),
            offset: offset.map(ToString::to_string),
            delimiter,
            next: NextPage::First,
            empty: 0,
        };
        stream::try_unfold(walk, |mut walk| async move { Ok(walk.page().await?.map(|page| (page, walk))) }).boxed()
    }
}

/// Next page of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NextPage {
    First,
    After(String),
    None,
}

/// A listing in progress.
struct Walk<T> {
    client: Arc<T>,
    bucket: Bucket,
    prefix: Option<String>,
    offset: Option<String>,
    delimiter: bool,
    next: NextPage,
    /// Pages without a key since the last one with some.
    empty: u32,
}

impl<T: PaginatedListStore> Walk<T> {
    /// The next page, if there is one.
    async fn page(&mut self) -> Result<Option<ListResult>> {
        let token = match mem::replace(&mut self.next, NextPage::None) {
            NextPage::First => None,
            NextPage::After(token) => Some(token),
            NextPage::None => return Ok(None),
        };
        let options = PaginatedListOptions {
            offset: self.offset.clone(),
            delimiter: self.delimiter.then_some(DELIMITER.into()),
            page_token: token.clone(),
            ..PaginatedListOptions::default()
        };
        let prefix = self.prefix.as_deref();
        let page = match self.client.list_paginated(prefix, options.clone()).await {
            Err(object_store::Error::InvalidPath { .. }) => {
                let page = self.bucket.page_of_paths(prefix, options).await;
                page.map_err(|error| object_store::Error::Generic { store: "listing", source: Box::new(error) })?
            }
            page => page?,
        };
        let is_empty = page.result.objects.is_empty() && page.result.common_prefixes.is_empty();
        self.empty = if is_empty { self.empty + 1 } else { 0 };
        let Some(next) = page.page_token.filter(|next| !next.is_empty()) else { return Ok(Some(page.result)) };
        if token.as_ref() == Some(&next) {
            return Err(self.endless("each page with its own continuation token".to_owned()));
        }
        if self.empty > EMPTY_PAGES_MAX {
            return Err(self.endless(format!("{} pages without a key, and a token for a further one", self.empty)));
        }
        self.next = NextPage::After(next);
        Ok(Some(page.result))
    }

    fn endless(&self, got: String) -> object_store::Error {
        let prefix = self.prefix.as_deref().unwrap_or_default();
        endless(format!("s3://{}/{prefix}", self.bucket.name()), got)
    }
}

/// Error of a listing at `place` that would never end.
fn endless(place: String, got: String) -> object_store::Error {
    let error = Error::unsupported("store lists objects without end")
        .at(place)
        .expected("pages that get on, and a last one")
        .got(got)
        .help("use a store that lists as S3 does (ListObjectsV2), or ask who runs it");
    object_store::Error::Generic { store: "listing", source: Box::new(error) }
}

/// Check of a listing for keys that come again: one key is compared with those after it, each time twice as many
/// (<https://doi.org/10.1007/BF01933190>).
#[derive(Debug)]
pub(super) struct ListingCheck {
    store: Arc<str>,
    kept: Option<Path>,
    listed: u64,
    keep_at: u64,
}

impl ListingCheck {
    /// Check of a listing of `store`.
    pub(super) fn new(store: Arc<str>) -> Self {
        Self { store, kept: None, listed: 0, keep_at: 1 }
    }

    /// Passes on `meta`, the next object.
    ///
    /// # Errors
    /// If its key came before.
    pub(super) fn check(&mut self, meta: ObjectMeta) -> Result<ObjectMeta> {
        if self.kept.as_ref() == Some(&meta.location) {
            return Err(endless(self.store.to_string(), format!("{} twice", meta.location)));
        }
        self.listed += 1;
        if self.listed == self.keep_at {
            (self.kept, self.keep_at) = (Some(meta.location.clone()), self.keep_at.saturating_mul(2));
        }
        Ok(meta)
    }
}

impl<T: fmt::Display> fmt::Display for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({})", self.client)
    }
}

/// Deletes `keys` with one request, or with one for each of them if its answer reports errors.
async fn delete_all<T: ObjectStore>(
    client: Arc<T>,
    singly: Arc<T>,
    keys: Vec<Path>,
) -> BoxStream<'static, Result<Path>> {
    let all = stream::iter(keys.clone()).map(Ok).boxed();
    let outcomes: Vec<Result<Path>> = client.delete_stream(all).collect().await;
    if outcomes.iter().any(|outcome| outcome.as_ref().is_err_and(is_not_all_deleted)) {
        return singly.delete_stream(stream::iter(keys).map(Ok).boxed());
    }
    stream::iter(outcomes).boxed()
}

fn objects_of(pages: BoxStream<'static, Result<ListResult>>) -> BoxStream<'static, Result<ObjectMeta>> {
    pages.map_ok(|page| stream::iter(page.objects.into_iter().map(Ok))).try_flatten().boxed()
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<T: ObjectStore + PaginatedListStore> ObjectStore for Pages<T> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.client.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.client.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.client.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.client.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (client, singly) = (Arc::clone(&self.client), Arc::clone(&self.singly));
        let deleted = locations.try_chunks(DELETED_AT_ONCE).map(move |keys| {
            let (client, singly) = (Arc::clone(&client), Arc::clone(&singly));
            async move { Ok::<_, object_store::Error>(delete_all(client, singly, keys.map_err(|error| error.1)?).await) }
        });
        deleted.buffered(DELETES_MAX).try_flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        objects_of(self.pages(prefix, None, false))
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        // Directory buckets do not know `start-after`.
        let (after, start) = (offset.clone(), Some(offset).filter(|_| !self.bucket.name().ends_with(DIRECTORY_BUCKET)));
        let listed = objects_of(self.pages(prefix, start, false));
        listed.try_filter(move |meta| std::future::ready(meta.location > after)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let together = |mut all: ListResult, page: ListResult| async move {
            all.common_prefixes.extend(page.common_prefixes);
            all.objects.extend(page.objects);
            Ok(all)
        };
        let mut pages = self.pages(prefix, None, true);
        // Each listing has a first page.
        let Some(first) = pages.try_next().await? else { return self.client.list_with_delimiter(prefix).await };
        let mut all = pages.try_fold(first, together).await?;
        all.common_prefixes.sort();
        all.common_prefixes.dedup();
        Ok(all)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.client.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.client.rename_opts(from, to, options).await
    }
}
