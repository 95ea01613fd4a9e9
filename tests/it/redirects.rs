//! A server that answers with redirects, or without end: nothing that was signed goes to where they point, nor is all of it read.

use std::io::ErrorKind as Io;
use std::net::TcpListener as Trap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path;
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use towline::error::{Error, ErrorKind};
use towline::storage::{Keys, Store, StoreOptions, connect, open};

/// An empty bucket, as far as listing goes.
const EMPTY: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount>\
                     <IsTruncated>false</IsTruncated></ListBucketResult>";

/// A server that redirects what it is asked to another one, which must see nothing.
struct Redirecting {
    endpoint: String,
    trap: Trap,
}

impl Redirecting {
    /// `listing`: requests that list are answered.
    async fn start(status: &'static str, listing: bool) -> Self {
        let trap = Trap::bind("127.0.0.1:0").unwrap();
        trap.set_nonblocking(true).unwrap();
        let elsewhere = format!("http://{}/elsewhere", trap.local_addr().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let head = read_request(&mut client).await;
                let answer = if listing && head.contains("list-type=2") {
                    let head =
                        format!("HTTP/1.1 200 OK\r\ncontent-type: application/xml\r\ncontent-length: {}", EMPTY.len());
                    format!("{head}\r\nconnection: close\r\n\r\n{EMPTY}")
                } else {
                    let head = format!("HTTP/1.1 {status}\r\nlocation: {elsewhere}\r\nx-amz-bucket-region: mars-1");
                    format!("{head}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                };
                client.write_all(answer.as_bytes()).await.ok();
            }
        });
        Self { endpoint, trap }
    }

    async fn open(&self) -> Result<Store, Error> {
        let keys = Keys {
            access_key_id: "towline".into(),
            secret_access_key: "towlinesecret".into(),
            session_token: Some("hush".into()),
        };
        let options = StoreOptions {
            endpoint: Some(self.endpoint.clone()),
            region: Some("us-east-1".into()),
            keys: Some(keys),
            ..StoreOptions::default()
        };
        open(&"s3://bucket/p".parse().unwrap(), &options).await
    }

    /// Fails if anybody has connected to where the redirects point.
    fn check_untouched(&self) {
        let came = self.trap.accept().map(|(_, who)| who).map_err(|error| error.kind());
        assert_eq!(came, Err(Io::WouldBlock), "a redirect was followed");
    }
}

/// Reads one request; its head.
async fn read_request(client: &mut TcpStream) -> String {
    let mut read = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&read).to_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let len = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            if body.len() >= len.map_or(0, |len| len.trim().parse().unwrap()) {
                return head.to_owned();
            }
        }
        if client.read_buf(&mut read).await.unwrap_or(0) == 0 {
            return String::new();
        }
    }
}

fn check(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Usage, "{error:?}");
    let (text, help) = (error.to_string(), error.help_text().unwrap_or_default());
    assert!(text.contains("lsewhere") || text.contains("another region"), "{error:?}");
    assert!(help.contains("AWS_REGION"), "{help}");
}

#[tokio::test]
async fn a_redirect_of_an_objects_request_is_not_followed() {
    for status in ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"] {
        let server = Redirecting::start(status, true).await;
        let store = server.open().await.unwrap();
        let (objects, key) = (store.objects(), Path::from("repository"));
        let read = Error::from(objects.get(&key).await.unwrap_err());
        check(&read);
        assert!(read.to_string().contains("mars-1") && read.to_string().contains(&status[..3]), "{read}");
        check(&Error::from(objects.put(&key, "bytes".into()).await.unwrap_err()));
        check(&Error::from(objects.head(&key).await.unwrap_err()));
        check(&Error::from(objects.delete(&key).await.unwrap_err()));
        server.check_untouched();
    }
}

#[tokio::test]
async fn a_redirect_of_a_buckets_request_is_not_followed() {
    for status in ["301 Moved Permanently", "307 Temporary Redirect"] {
        let server = Redirecting::start(status, false).await;
        check(&server.open().await.unwrap_err());
        server.check_untouched();
    }
}

/// A server whose answers have `head` and never end; how many bytes of bodies it got rid of.
async fn endless(head: &'static str) -> (Redirecting, Arc<AtomicU64>) {
    let trap = Trap::bind("127.0.0.1:0").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let sent = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&sent);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                read_request(&mut client).await;
                let head = format!("HTTP/1.1 {head}\r\ntransfer-encoding: chunked\r\n\r\n");
                client.write_all(head.as_bytes()).await.ok();
                let chunk = [&b"10000\r\n"[..], &vec![b'x'; 0x10000], b"\r\n"].concat();
                while client.write_all(&chunk).await.is_ok() {
                    counted.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                }
            });
        }
    });
    (Redirecting { endpoint, trap }, sent)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_do_not_end_are_not_read_to_the_end() {
    for head in ["403 Forbidden", "404 Not Found", "200 OK"] {
        let (server, sent) = endless(head).await;
        // The bucket's own requests.
        server.open().await.unwrap_err();
        let keys = Keys { access_key_id: "a".into(), secret_access_key: "b".into(), session_token: None };
        let options = StoreOptions {
            endpoint: Some(server.endpoint.clone()),
            region: Some("us-east-1".into()),
            keys: Some(keys),
            ..StoreOptions::default()
        };
        // Objects' requests.
        let store = connect(&"s3://bucket/p".parse().unwrap(), &options).await.unwrap();
        store.objects().list(None).try_collect::<Vec<_>>().await.unwrap_err();
        assert!(store.objects().get(&Path::from("repository")).await.is_err());
        let sent = sent.load(Ordering::Relaxed);
        assert!(sent < 256 << 20, "{head}: {sent} bytes were taken");
    }
}

/// A bucket that answers request `n` with the document `answer(n)`; and the number of requests so far.
async fn answering(answer: impl Fn(u64) -> String + Send + 'static) -> (Store, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let requests = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            read_request(&mut client).await;
            let body = answer(counted.fetch_add(1, Ordering::Relaxed));
            let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/xml\r\ncontent-length: {}", body.len());
            client.write_all(format!("{head}\r\nconnection: close\r\n\r\n{body}").as_bytes()).await.ok();
        }
    });
    (bucket_at(endpoint).await, requests)
}

/// The bucket at `endpoint`.
async fn bucket_at(endpoint: String) -> Store {
    let keys = Keys { access_key_id: "a".into(), secret_access_key: "b".into(), session_token: None };
    let options = StoreOptions {
        endpoint: Some(endpoint),
        region: Some("us-east-1".into()),
        keys: Some(keys),
        ..StoreOptions::default()
    };
    connect(&"s3://bucket/p".parse().unwrap(), &options).await.unwrap()
}

/// A bucket that refuses all with status 400 and `code`, of which the answer to a HEAD has nothing.
async fn refusing(code: &'static str) -> Store {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let is_head = read_request(&mut client).await.starts_with("head ");
            let body = if is_head { String::new() } else { format!("<Error><Code>{code}</Code></Error>") };
            let head = format!("HTTP/1.1 400 Bad Request\r\ncontent-length: {}\r\nconnection: close", body.len());
            client.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.ok();
        }
    });
    bucket_at(endpoint).await
}

#[tokio::test]
async fn an_object_that_the_store_refuses_is_damaged_unless_the_refusal_may_pass() {
    for (code, kind) in [
        ("InvalidRequest", ErrorKind::Damaged),
        ("KMS.DisabledException", ErrorKind::Other),
        ("ExpiredToken", ErrorKind::Unreachable),
    ] {
        let (store, key) = (refusing(code).await, Path::from("pack/1"));
        for error in [store.objects().get(&key).await.unwrap_err(), store.objects().head(&key).await.unwrap_err()] {
            let error = Error::from(error);
            assert_eq!(error.kind(), kind, "{code}: {error:?}");
            assert!(format!("{error:?}").contains(code), "{error:?}");
        }
    }
}

/// Page `n` of a listing: keys, and the continuation token if there is one more.
type Page = fn(u64) -> (Vec<u64>, Option<String>);

/// A bucket whose listing has `page`, and the number of requests so far.
async fn listing(page: Page) -> (Store, Arc<AtomicU64>) {
    answering(move |n| {
        let (keys, next) = page(n);
        let truncated = format!("<IsTruncated>{}</IsTruncated>", next.is_some());
        let key = |key| {
            let at = "<LastModified>2026-11-24T13:10:02.000Z</LastModified>";
            format!("<Contents><Key>p/log/{key:020}</Key>{at}<Size>1</Size></Contents>")
        };
        let keys = keys.into_iter().map(key).collect::<Vec<_>>().concat();
        let next = next.map(|next| format!("<NextContinuationToken>{next}</NextContinuationToken>"));
        format!("<ListBucketResult>{truncated}{keys}{}</ListBucketResult>", next.unwrap_or_default())
    })
    .await
}

#[tokio::test]
async fn a_listing_of_unfinished_uploads_without_any_on_its_pages_is_an_error_after_few_requests() {
    let (store, requests) = answering(|n| {
        let next = format!("<NextKeyMarker>p/{n:020}</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>");
        format!("<ListMultipartUploadsResult>{next}<IsTruncated>true</IsTruncated></ListMultipartUploadsResult>")
    })
    .await;
    let error = store.bucket().unwrap().unfinished_uploads(|_| true).await.unwrap_err();
    assert!(error.to_string().contains("unfinished uploads does not get on"), "{error:?}");
    assert_eq!(requests.load(Ordering::Relaxed), 65);
}

/// Whoever may write into the bucket can write such keys.
#[tokio::test]
async fn keys_that_are_no_paths_are_passed_over() {
    let (store, requests) = answering(|_| {
        let key = |key| {
            let at = "<LastModified>2026-11-24T13:10:02.000Z</LastModified>";
            format!("<Contents><Key>p/log/{key}</Key>{at}<ETag>\"e\"</ETag><Size>7</Size></Contents>")
        };
        let keys: String = ["../x", "1", "a//b", "./2", "3"].into_iter().map(key).collect();
        let folders = ["..", "a"].map(|name| format!("<CommonPrefixes><Prefix>p/{name}/</Prefix></CommonPrefixes>"));
        format!("<ListBucketResult><IsTruncated>false</IsTruncated>{keys}{}</ListBucketResult>", folders.concat())
    })
    .await;
    let found: Vec<_> = store.objects().list(Some(&Path::from("log"))).try_collect().await.unwrap();
    let found: Vec<_> = found.iter().map(|meta| (meta.location.as_ref(), meta.size, meta.e_tag.as_deref())).collect();
    assert_eq!(found, [("log/1", 7, Some("\"e\"")), ("log/3", 7, Some("\"e\""))]);
    assert_eq!(requests.load(Ordering::Relaxed), 2);
    let found = store.objects().list_with_delimiter(None).await.unwrap();
    assert_eq!((found.objects.len(), found.common_prefixes), (2, vec![Path::from("a")]));
}

#[tokio::test]
async fn objects_whose_bulk_delete_reports_errors_are_deleted_singly() {
    let error = |key: &str| format!("<Error><Key>{key}</Key><Code>InternalError</Code><Message>m</Message></Error>");
    for odd in [error(""), error("p/never/asked/for"), error("a//b"), error("p/0"), "<Error/>".to_owned()] {
        let answer = format!("<DeleteResult><Deleted><Key>p/1</Key></Deleted>{odd}</DeleteResult>");
        let (store, requests) = answering(move |n| if n == 0 { answer.clone() } else { String::new() }).await;
        let keys = ["0", "1", "2"].map(|key| Ok(Path::from(key)));
        let deleted: Vec<_> = store.objects().delete_stream(stream::iter(keys).boxed()).try_collect().await.unwrap();
        assert_eq!((deleted.len(), requests.load(Ordering::Relaxed)), (3, 4), "{odd}");
    }
    let (store, requests) =
        answering(|_| "<DeleteResult><Deleted><Key>p/0</Key></Deleted></DeleteResult>".to_owned()).await;
    store.objects().delete(&Path::from("0")).await.unwrap();
    assert_eq!(requests.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_listing_whose_pages_do_not_get_on_is_an_error_after_few_requests() {
    let endless: [(&str, u64, Page); 4] = [
        ("its own continuation token", 2, |n| (vec![n], Some("again".into()))),
        ("pages without a key", 65, |n| (vec![], Some(format!("token-{n}")))),
        ("pages without a key", 66, |n| (if n == 0 { vec![7] } else { vec![] }, Some(format!("token-{n}")))),
        ("twice", 7, |n| (vec![n % 3], Some(format!("token-{n}")))),
    ];
    for (what, most, page) in endless {
        let (store, requests) = listing(page).await;
        let error =
            Error::from(store.objects().list(Some(&Path::from("log"))).try_collect::<Vec<_>>().await.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        let text = error.to_string();
        assert!(text.contains(what) && text.contains("at s3://bucket/p"), "{text}");
        assert_eq!(requests.load(Ordering::Relaxed), most, "{what}");
    }
    // Pages may be empty, or out of order, as long as the listing gets on.
    let (store, requests) = listing(|n| {
        let keys = if n % 2 == 0 { vec![100 - n, 1000 - n] } else { vec![] };
        (keys, (n < 99).then(|| format!("token-{n}")))
    })
    .await;
    let found: Vec<_> = store.objects().list(Some(&Path::from("log"))).try_collect().await.unwrap();
    assert_eq!((found.len(), requests.load(Ordering::Relaxed)), (100, 100));
}
