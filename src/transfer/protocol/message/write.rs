//! Writing messages: header and body in one piece, except a frame's stored bytes, which are never copied.

use bytes::Bytes;

use super::{Frame, Hello, Kind, Message};
use crate::format::wire::Writer;
use crate::transfer::protocol::limits::{HEADER_LEN, MAGIC};

impl Message {
    /// Kind of the message.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Request(request) if request.wanted.alone.is_empty() => Kind::Request,
            Self::Request(_) => Kind::RequestAlone,
            Self::Find(_) => Kind::Find,
            Self::Found(_) => Kind::Found,
            Self::Frame(_) => Kind::Frame,
            Self::Missing(_) => Kind::Missing,
            Self::Ended(_) => Kind::Ended,
            Self::Cancel { .. } => Kind::Cancel,
            Self::Credit { .. } => Kind::Credit,
            Self::Ping { .. } => Kind::Ping,
            Self::Pong { .. } => Kind::Pong,
            Self::Goodbye { .. } => Kind::Goodbye,
            Self::Error { .. } => Kind::Error,
            Self::Fetching => Kind::Fetching,
        }
    }

    /// Bytes of the message: header and body, and separately a frame's stored bytes.
    #[must_use]
    pub fn write(&self) -> (Bytes, Bytes) {
        let mut body = Writer::new();
        let mut after = Bytes::new();
        match self {
            Self::Hello(hello) => hello.write(&mut body),
            Self::Request(request) => {
                body.varint(request.request).u8(request.priority as u8).bytes(request.manifest.as_bytes());
                request.wanted.chunks.write(&mut body);
                body.count(request.wanted.bases.len());
                body.each(&request.wanted.bases, |body, id| body.bytes(id.as_bytes()));
                if !request.wanted.alone.is_empty() {
                    request.wanted.alone.write(&mut body);
                }
            }
            Self::Find(find) => {
                body.varint(find.request).bytes(find.manifest.as_bytes()).varint(find.from.into());
            }
            Self::Found(found) => {
                let survey = &found.survey;
                body.varint(found.request).varint(survey.chunks.into()).varint(survey.upto.into());
                survey.held.write(&mut body);
            }
            Self::Frame(frame) => {
                frame.write(&mut body);
                after = frame.stored.clone();
            }
            Self::Missing(missing) => {
                body.varint(missing.request);
                missing.ordinals.write(&mut body);
            }
            Self::Ended(ended) => {
                body.varint(ended.request).u8(ended.code as u8).string(ended.text.as_bytes());
            }
            Self::Cancel { request: number }
            | Self::Credit { granted: number }
            | Self::Ping { nonce: number }
            | Self::Pong { nonce: number } => {
                body.varint(*number);
            }
            Self::Goodbye { text } => {
                body.string(text.as_bytes());
            }
            Self::Fetching => {}
            Self::Error { code, text } => {
                body.u8(*code as u8).string(text.as_bytes());
            }
        }
        (with_header(self.kind(), &body.into_bytes(), after.len()), after)
    }
}

/// Message of `kind` with the body `body` and `after` more bytes.
fn with_header(kind: Kind, body: &[u8], after: usize) -> Bytes {
    let mut out = Vec::with_capacity(HEADER_LEN + body.len());
    // Every message is far below 4 GiB by its limits.
    out.extend_from_slice(&u32::try_from(body.len() + after).unwrap_or(u32::MAX).to_le_bytes());
    out.push(kind as u8);
    out.extend_from_slice(body);
    out.into()
}

impl Hello {
    fn write(&self, body: &mut Writer) {
        body.bytes(&MAGIC).string(&self.versions);
        for text in [&self.software, &self.site, &self.agent] {
            body.string(text.as_bytes());
        }
        body.varint(self.window).varint(self.requests.into()).count(self.extensions.len());
        for (number, value) in &self.extensions {
            body.varint(*number).string(value);
        }
    }
}

impl Frame {
    /// Bytes of the whole message: its charge against the credit.
    #[must_use]
    pub fn charge(&self) -> u64 {
        let varint = |value: u64| u64::from((64 - value.leading_zeros()).div_ceil(7).max(1));
        let numbers = [self.request, self.ordinal.into(), self.plain_len.into()].map(varint);
        let base = if self.base.is_some() { 32 } else { 0 };
        HEADER_LEN as u64 + numbers.iter().sum::<u64>() + 2 + base + self.stored.len() as u64
    }

    /// Writes all but the stored bytes.
    fn write(&self, body: &mut Writer) {
        body.varint(self.request).varint(self.ordinal.into()).u8(self.codec).varint(self.plain_len.into());
        match &self.base {
            Some(base) => body.u8(1).bytes(base.as_bytes()),
            None => body.u8(0),
        };
    }
}
