//! Reading messages: every length is checked against its limit before it is used.

use bytes::Bytes;

use super::{
    EndCode, Ended, ErrorCode, Find, Found, Frame, FrameHead, Hello, Kind, Message, Missing, Priority, Request,
};
use super::{Survey, Wanted};
use crate::format::wire::{Read, Reader};
use crate::id::{ChunkId, ManifestId};
use crate::limits::CHUNK_LEN_MAX;
use crate::transfer::protocol::limits::{
    BASES_MAX, CHUNKS_MAX, EXTENSION_LEN_MAX, EXTENSIONS_MAX, MAGIC, NAME_LEN_MAX, TEXT_LEN_MAX, VERSIONS_MAX,
    WINDOW_MAX,
};
use crate::transfer::protocol::runs::Runs;

impl Message {
    /// Parses a message of `kind` with the body `body`.
    ///
    /// # Errors
    /// Malformed, with the fault and its position, if the body does not fit the kind.
    pub fn read(kind: Kind, body: &Bytes) -> Read<Self> {
        let mut reader = Reader::new(body);
        let message = match kind {
            Kind::Hello => Self::Hello(Hello::read(&mut reader)?),
            Kind::Request => Self::Request(Request::read(&mut reader)?),
            Kind::Find => {
                let (request, manifest) = (reader.varint()?, manifest(&mut reader)?);
                Self::Find(Find { request, manifest, from: reader.varint32()? })
            }
            Kind::Found => {
                let request = reader.varint()?;
                let survey = Survey::read(&mut reader)?;
                Self::Found(Found { request, survey })
            }
            Kind::Frame => return Frame::read(reader, body).map(Self::Frame),
            Kind::Missing => {
                let (request, ordinals) = (reader.varint()?, Runs::read(&mut reader)?);
                if ordinals.is_empty() {
                    return Err(reader.malformed("list of missing chunks is empty"));
                }
                Self::Missing(Missing { request, ordinals })
            }
            Kind::Ended => {
                let request = reader.varint()?;
                let code = code(&mut reader, EndCode::ALL, |code| code as u8)?;
                Self::Ended(Ended { request, code, text: text(&mut reader)? })
            }
            Kind::Cancel => Self::Cancel { request: reader.varint()? },
            Kind::Credit => Self::Credit { granted: reader.varint()? },
            Kind::Ping => Self::Ping { nonce: reader.varint()? },
            Kind::Pong => Self::Pong { nonce: reader.varint()? },
            Kind::Goodbye => Self::Goodbye { text: text(&mut reader)? },
            Kind::RequestAlone => Self::Request(Request::read_alone(&mut reader)?),
            Kind::Fetching => Self::Fetching,
            Kind::Error => {
                let code = code(&mut reader, ErrorCode::ALL, |code| code as u8)?;
                Self::Error { code, text: text(&mut reader)? }
            }
        };
        reader.finish()?;
        Ok(message)
    }
}

impl Hello {
    fn read(reader: &mut Reader<'_>) -> Read<Self> {
        if reader.array::<4>()? != MAGIC {
            return Err(reader.malformed("this is not the towline protocol"));
        }
        let versions = reader.string(VERSIONS_MAX)?.to_vec();
        if versions.is_empty() || !versions.is_sorted_by(|a, b| a < b) {
            return Err(reader.malformed("versions are not ascending"));
        }
        let (software, site, agent) = (name(reader)?, name(reader)?, name(reader)?);
        let (window, requests) = (reader.varint()?, reader.varint32()?);
        if window > WINDOW_MAX {
            return Err(reader.malformed("window is too large"));
        }
        let count = reader.count(2)?;
        if count > EXTENSIONS_MAX {
            return Err(reader.malformed("too many extensions"));
        }
        let mut extensions = Vec::with_capacity(count);
        for _ in 0..count {
            extensions.push((reader.varint()?, reader.string(EXTENSION_LEN_MAX)?.to_vec()));
        }
        Ok(Self { versions, software, site, agent, window, requests, extensions })
    }
}

impl Request {
    fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let request = reader.varint()?;
        let byte = reader.u8()?;
        let priority = Priority::ALL.into_iter().find(|&priority| priority as u8 == byte);
        let priority = priority.ok_or_else(|| reader.malformed("unknown priority"))?;
        let (manifest, chunks) = (manifest(reader)?, Runs::read(reader)?);
        if chunks.len() > CHUNKS_MAX {
            return Err(reader.malformed("too many chunks in one request"));
        }
        let count = reader.count(ChunkId::LEN)?;
        if count > BASES_MAX {
            return Err(reader.malformed("too many bases in one request"));
        }
        let mut bases = Vec::with_capacity(count);
        for _ in 0..count {
            bases.push(ChunkId::from_bytes(reader.array()?));
        }
        let wanted = Wanted { chunks, bases, ..Wanted::default() };
        if wanted.is_empty() {
            return Err(reader.malformed("request names no chunk"));
        }
        Ok(Self { request, priority, manifest, wanted })
    }

    /// Reads a request of which some chunks are to come without their bases.
    fn read_alone(reader: &mut Reader<'_>) -> Read<Self> {
        let mut asked = Self::read(reader)?;
        let alone = Runs::read(reader)?;
        if alone.ranges().last().is_none_or(|last| u64::from(last.end) > asked.wanted.len()) {
            return Err(reader.malformed("chunks without bases are none, or not of the request"));
        }
        asked.wanted.alone = alone;
        Ok(asked)
    }
}

impl Survey {
    fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let (chunks, upto, held) = (reader.varint32()?, reader.varint32()?, Runs::read(reader)?);
        if upto > chunks || held.ranges().last().is_some_and(|last| last.end > upto) {
            return Err(reader.malformed("more chunks are held than listed"));
        }
        Ok(Self { chunks, upto, held })
    }
}

impl FrameHead {
    /// Reads what comes before the stored bytes: at most [`FRAME_HEAD_MAX`](crate::transfer::protocol::limits::FRAME_HEAD_MAX) bytes.
    pub(in crate::transfer::protocol) fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let (request, ordinal) = (reader.varint()?, reader.varint32()?);
        let (codec, plain_len) = (reader.u8()?, reader.varint32()?);
        let base = if reader.flag()? { Some(ChunkId::from_bytes(reader.array()?)) } else { None };
        if u64::from(plain_len) > CHUNK_LEN_MAX {
            return Err(reader.malformed("chunk is too long"));
        }
        Ok(Self { request, ordinal, codec, plain_len, base })
    }
}

impl Frame {
    fn read(mut reader: Reader<'_>, body: &Bytes) -> Read<Self> {
        let FrameHead { request, ordinal, codec, plain_len, base } = FrameHead::read(&mut reader)?;
        let stored = body.slice(body.len() - reader.remaining()..);
        if stored.len() > plain_len as usize {
            return Err(reader.malformed("stored length exceeds the plain length"));
        }
        Ok(Self { request, ordinal, codec, plain_len, base, stored })
    }
}

fn manifest(reader: &mut Reader<'_>) -> Read<ManifestId> {
    reader.array().map(ManifestId::from_bytes)
}

fn code<T: Copy>(reader: &mut Reader<'_>, all: &[T], byte_of: impl Fn(T) -> u8) -> Read<T> {
    let byte = reader.u8()?;
    all.iter().copied().find(|&code| byte_of(code) == byte).ok_or_else(|| reader.malformed("unknown code"))
}

fn name(reader: &mut Reader<'_>) -> Read<String> {
    printable(reader, NAME_LEN_MAX)
}

fn text(reader: &mut Reader<'_>) -> Read<String> {
    printable(reader, TEXT_LEN_MAX)
}

/// Text of the other side for logs and terminals, without control characters.
fn printable(reader: &mut Reader<'_>, limit: usize) -> Read<String> {
    let text = reader.text(limit)?;
    if text.chars().any(char::is_control) {
        return Err(reader.malformed("text holds control characters"));
    }
    Ok(text.to_owned())
}
