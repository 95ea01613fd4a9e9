//! Events of a task, as the agent streams them.

use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::{Frame, Incoming};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::STUCK_AFTER;
use crate::agent::view::Task;

/// Limit of an event, in bytes.
const EVENT_LEN_MAX: usize = 16 << 20;

/// Events of a stream (<https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream>).
pub(super) struct Events {
    body: Incoming,
    read: BytesMut,
    /// Bytes of `read` in which no end of an event begins.
    searched: usize,
}

impl Events {
    /// Events in the body of a response.
    pub(super) fn of(body: Incoming) -> Self {
        Self { body, read: BytesMut::new(), searched: 0 }
    }

    /// The next event; None at the end. The error is [`Elapsed`] if not even a comment comes.
    pub(super) async fn next(&mut self) -> Result<Option<Task>, Box<dyn std::error::Error + Send + Sync>> {
        loop {
            while let Some(end) = end_of_event(&self.read, &mut self.searched) {
                let event = self.read.split_to(end);
                self.read.advance(2);
                if let Some(data) = data(&event) {
                    return Ok(Some(serde_json::from_slice(&data)?));
                }
            }
            if self.read.len() > EVENT_LEN_MAX {
                return Err("an event is too long".into());
            }
            match self.frame().await? {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(bytes) = frame?.into_data() {
                        self.read.extend_from_slice(&bytes);
                    }
                }
            }
        }
    }

    /// The next frame. It is waited for twice: after a pause of this process, such as by Ctrl-Z, the first time is over at once.
    async fn frame(&mut self) -> Result<Option<Result<Frame<Bytes>, hyper::Error>>, Elapsed> {
        match timeout(STUCK_AFTER / 2, self.body.frame()).await {
            Ok(frame) => Ok(frame),
            Err(_) => timeout(STUCK_AFTER / 2, self.body.frame()).await,
        }
    }
}

/// Place of the empty line that ends the first event in `read`, of which `searched` bytes were searched before.
fn end_of_event(read: &[u8], searched: &mut usize) -> Option<usize> {
    let from = *searched;
    let found = read.get(from..)?.windows(2).position(|two| two == b"\n\n").map(|at| from + at);
    *searched = if found.is_some() { 0 } else { read.len().saturating_sub(1) };
    found
}

/// Data of an event; none if it is a comment.
fn data(event: &[u8]) -> Option<Vec<u8>> {
    let lines = event.split(|&byte| byte == b'\n').filter_map(|line| line.strip_prefix(b"data:"));
    let lines: Vec<_> = lines.map(|line| line.strip_prefix(b" ").unwrap_or(line)).collect();
    (!lines.is_empty()).then(|| lines.join(&b'\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_ends_at_an_empty_line_wherever_its_pieces_end() {
        let text = b"data: 1\n\ndata: 22\n\n";
        for len in 1..text.len() {
            let (mut read, mut searched, mut ends) = (BytesMut::new(), 0, Vec::new());
            for piece in text.chunks(len) {
                read.extend_from_slice(piece);
                while let Some(end) = end_of_event(&read, &mut searched) {
                    ends.push(read.split_to(end).freeze());
                    read.advance(2);
                }
                assert!(searched + 1 >= read.len(), "the rest is not searched again");
            }
            assert_eq!(ends, [&b"data: 1"[..], b"data: 22"]);
        }
    }

    #[test]
    fn comments_are_no_events() {
        assert_eq!(data(b":\n"), None);
        assert_eq!(data(b"event: end\ndata: {}").unwrap(), b"{}");
        assert_eq!(data(b"data:a\ndata: b").unwrap(), b"a\nb");
    }
}
