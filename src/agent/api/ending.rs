//! Responses that are cut off when their token ends.

use std::io;
use std::pin::pin;

use axum::body::Body;
use axum::response::Response;
use futures::StreamExt as _;
use futures::stream::unfold;
use hyper::body::Body as _;

/// `response`, cut off once `ended` returns, unless its body is complete in memory.
pub(super) fn cut_off(response: Response, ended: impl Future<Output = ()> + Send + 'static) -> Response {
    response.map(|body| {
        if body.size_hint().exact().is_some() {
            return body;
        }
        let parts = (body.into_data_stream(), Box::pin(ended));
        Body::from_stream(unfold(Some(parts), |parts| async move {
            let (mut body, mut ended) = parts?;
            let next = {
                let mut next = pin!(body.next());
                tokio::select! {
                    biased;
                    () = &mut ended => None,
                    next = &mut next => Some(next),
                }
            };
            match next {
                // An error, so that the client does not take the part for the whole.
                None => Some((Err(io::Error::from(io::ErrorKind::PermissionDenied)), None)),
                Some(piece) => Some((piece?.map_err(io::Error::other), Some((body, ended)))),
            }
        }))
    })
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use futures::stream;
    use hyper::body::Bytes;

    use super::*;

    fn streamed(pieces: impl futures::Stream<Item = io::Result<Bytes>> + Send + 'static) -> Response {
        Response::new(Body::from_stream(pieces))
    }

    async fn read(response: Response) -> Result<Bytes, axum::Error> {
        to_bytes(response.into_body(), 1 << 20).await
    }

    #[tokio::test]
    async fn a_stream_breaks_off_and_what_is_at_hand_does_not() {
        let two = || stream::iter(["a", "b"]).map(|piece| Ok(Bytes::from(piece)));
        assert_eq!(read(cut_off(streamed(two()), std::future::pending())).await.unwrap(), "ab");
        assert!(read(cut_off(streamed(two()), std::future::ready(()))).await.is_err());
        let endless = two().chain(stream::pending());
        let soon = tokio::time::sleep(std::time::Duration::from_millis(5));
        assert!(read(cut_off(streamed(endless), soon)).await.is_err());
        let whole = Response::new(Body::from("whole"));
        assert_eq!(read(cut_off(whole, std::future::ready(()))).await.unwrap(), "whole");
    }
}
