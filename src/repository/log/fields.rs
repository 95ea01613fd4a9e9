//! Fields of log entries and states.

use crate::error::{Error, Result};
use crate::format::wire::{Read, Reader, Writer};
use crate::id::{ManifestId, ObjectId, Owned, SessionId};
use crate::limits::NAME_LEN_MAX;
use crate::name::Name;

pub(super) fn write_owned(out: &mut Writer, id: Owned) {
    out.bytes(&id.session.to_bytes()).bytes(&id.object.to_bytes());
}

pub(super) fn read_owned(reader: &mut Reader<'_>) -> Read<Owned> {
    Ok(Owned { session: read_session(reader)?, object: ObjectId::from_bytes(reader.array()?) })
}

pub(super) fn read_session(reader: &mut Reader<'_>) -> Read<SessionId> {
    reader.array().map(SessionId::from_bytes)
}

pub(super) fn read_name(reader: &mut Reader<'_>) -> Result<Name> {
    reader.kept_text(NAME_LEN_MAX)?.parse().map_err(|error: Error| Error::damaged("log holds a bad name").source(error))
}

pub(super) fn read_manifest_id(reader: &mut Reader<'_>) -> Read<ManifestId> {
    reader.array().map(ManifestId::from_bytes)
}
