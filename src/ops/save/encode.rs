//! Encoding of each new chunk: in a bundle, derived from another chunk of the save, as a difference to a chunk of the parent, or
//! without a base.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::contents::{Contents, read_again};
use super::encode_bundle::{BundleMemory, EncodedBundle, NewBundle};
use super::if_faster::EncodeChoice;
use super::parent::{BaseCandidate, Parent};
use super::read::HashedChunk;
use crate::budget::{Budget, Buffer};
use crate::codec::{Compression, Encoded, alone_len, encode, encode_derived, encode_difference, rounded};
use crate::error::Result;
use crate::id::ChunkId;
use crate::limits::MIB;
use crate::repository::{Delivered, Gaps, PackRead, Repository, deliver, plan, read_pack};
use crate::tree::Walk;
use crate::work::blocking;

/// Bytes of bases that are read at once.
const BASES_READ_MAX: u64 = 2 * MIB;

/// Chunk that is not in the repository yet.
#[derive(Debug)]
pub(super) struct NewChunk {
    pub(super) chunk: HashedChunk,
    /// Index of its file.
    pub(super) file: usize,
    /// Possible base of a difference.
    pub(super) base: BaseCandidate,
    /// Bundle to store it in, with its other chunks.
    pub(super) bundle: Option<NewBundle>,
}

impl NewChunk {
    fn form(&self, encoded: Encoded) -> StoredForm {
        StoredForm::of(self.chunk.id, encoded, &self.chunk.bytes)
    }
}

/// Encoded chunk.
#[derive(Debug)]
pub(super) struct EncodedChunk {
    pub(super) form: StoredForm,
    pub(super) file: usize,
    pub(super) start: u64,
    /// True if it holds numbers of one type.
    pub(super) numbers: bool,
    pub(super) base: BaseCandidate,
    /// True if it is stored raw because the repository is faster than the encoder.
    pub(super) faster: bool,
    /// The bundle that it is part of, if that is stored with it.
    pub(super) bundle: Option<Box<EncodedBundle>>,
}

/// A chunk as it is stored.
#[derive(Debug)]
pub(super) struct StoredForm {
    pub(super) id: ChunkId,
    pub(super) encoded: Encoded,
    pub(super) plain_len: u32,
    /// Bytes of the chunk if it were stored without its base; 0 if it has none.
    pub(super) alone_len: u32,
}

/// Batch of encoded chunks.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) done: Vec<EncodedChunk>,
    /// Bytes that were encoded, and the sum of the workers' time; None if the batch is raw.
    pub(super) encoded: Option<(u64, Duration)>,
}

/// Context to encode the chunks of a save.
#[derive(Clone, Debug)]
pub(super) struct Encoding {
    pub(super) repository: Repository,
    pub(super) walk: Arc<Walk>,
    pub(super) contents: Arc<Contents>,
    pub(super) compression: Compression,
    /// True if chunks may be derived.
    pub(super) derive: bool,
    pub(super) parent: Option<Arc<Parent>>,
    /// Memory for bases, separate from the chunks' own buffers, which are held meanwhile.
    pub(super) budget: Option<Budget>,
    /// Memory for bundles; none if there are none.
    pub(super) bundle_memory: Option<BundleMemory>,
}

impl Encoding {
    /// Encodes chunks on workers, keeping their order. `choice` selects raw where that is faster.
    pub(super) async fn encode(self, new: Vec<NewChunk>, choice: EncodeChoice) -> Result<Batch> {
        if self.compression == Compression::Off || choice == EncodeChoice::Raw {
            let faster = choice == EncodeChoice::Raw;
            let raw = |new: NewChunk| EncodedChunk {
                faster,
                ..EncodedChunk::new(&new, new.form(encode(&new.chunk.bytes, Compression::Off, None)))
            };
            return Ok(Batch { done: new.into_iter().map(raw).collect(), encoded: None });
        }
        let bytes = new.iter().map(|new| new.chunk.bytes.len() as u64).sum();
        let (mut bundled, mut others) = (Vec::new(), Vec::with_capacity(new.len()));
        for new in new {
            match (&new.bundle, &self.bundle_memory) {
                (Some(bundle), Some(bundle_memory)) => {
                    bundled.push(Box::pin(self.encode_bundled(&new, bundle, bundle_memory)).await?);
                }
                _ => others.push(new),
            }
        }
        let new = Arc::new(others);
        let (this, chunks) = (self.clone(), Arc::clone(&new));
        let derive = move || chunks.iter().map(|new| this.derive(new)).collect::<Vec<_>>();
        let (derived, deriving) = self.timed(derive).await?;
        let (mut differences, differing) = self.differences(&new, &derived).await;
        let encode = move || {
            let one = |((at, new), derived): ((usize, &NewChunk), Option<Encoded>)| {
                let found = derived.or_else(|| differences.remove(&at));
                let alone = || encode(&new.chunk.bytes, Compression::Auto, new.chunk.number);
                EncodedChunk::new(new, new.form(found.unwrap_or_else(alone)))
            };
            new.iter().enumerate().zip(derived).map(one).collect::<Vec<_>>()
        };
        let (done, encoding) = self.timed(encode).await?;
        bundled.extend(done);
        Ok(Batch { done: bundled, encoded: Some((bytes, deriving + differing + encoding)) })
    }

    /// Runs on a worker and measures the time.
    async fn timed<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<(T, Duration)> {
        let clock = Arc::clone(self.repository.clock());
        let timed = move || {
            let begun = clock.now();
            let done = work();
            Ok((done, clock.now().since(begun)))
        };
        blocking(timed).await
    }

    /// Encodes the chunk as the rounding of a 32-bit chunk of the save, if it is one.
    fn derive(&self, new: &NewChunk) -> Option<Encoded> {
        // Zeros are equal in 16 and 32 bits: such a chunk would be both derived and the base of a derived one. It takes no
        // space anyway.
        if !self.derive || new.chunk.bytes.iter().all(|&byte| byte == 0) {
            return None;
        }
        let range = new.chunk.start..new.chunk.start + new.chunk.bytes.len() as u64;
        let (file, range) = self.contents.master(new.file, &range)?;
        let master = read_again(&self.walk, file, range).ok()?;
        (rounded(&master) == new.chunk.bytes).then(|| encode_derived(ChunkId::of(&master)))
    }

    /// Encodes chunks of `new` that are not `derived` as differences where that saves enough; returns the time without reading.
    /// Bases that cannot be read only cost space.
    async fn differences(
        &self,
        new: &Arc<Vec<NewChunk>>,
        derived: &[Option<Encoded>],
    ) -> (HashMap<usize, Encoded>, Duration) {
        let (mut encoded, mut spent) = (HashMap::new(), Duration::ZERO);
        let (Some(parent), Some(budget)) = (&self.parent, &self.budget) else { return (encoded, spent) };
        let mut wanting: HashMap<u32, Vec<usize>> = HashMap::new();
        for (at, (new, _)) in new.iter().zip(derived).enumerate().filter(|(_, (_, derived))| derived.is_none()) {
            if let (BaseCandidate::Chunk(base), Some(_)) = (new.base, new.chunk.number) {
                wanting.entry(base).or_default().push(at);
            }
        }
        let saved = &parent.saved;
        let bases = wanting.keys().copied();
        let reads = plan(|chunk| saved.locate(chunk), bases, BASES_READ_MAX, Gaps::Wide).unwrap_or_default();
        let wanting = Arc::new(wanting);
        for read in reads {
            let (saved, new, wanting) = (Arc::clone(saved), Arc::clone(new), Arc::clone(&wanting));
            let clock = Arc::clone(self.repository.clock());
            let work = move |read: &PackRead, buffer: Buffer| {
                let (mut encoded, begun) = (Vec::new(), clock.now());
                deliver(
                    read,
                    &buffer,
                    |chunk| saved.locate(chunk),
                    |delivered: Delivered<'_>| {
                        let base = delivered.chunk?;
                        for &at in wanting.get(&delivered.index).map(Vec::as_slice).unwrap_or_default() {
                            let Some(HashedChunk { bytes, number: Some(number), .. }) =
                                new.get(at).map(|new| &new.chunk)
                            else {
                                continue;
                            };
                            let difference = encode_difference(bytes, base.id(), base.bytes(), *number);
                            encoded.extend(difference.map(|difference| (at, difference)));
                        }
                        Ok(())
                    },
                )?;
                Ok((encoded, clock.now().since(begun)))
            };
            match read_pack(&[&self.repository], budget, read, work).await {
                Ok((found, took)) => {
                    encoded.extend(found);
                    spent += took;
                }
                Err(error) => tracing::warn!("chunks are stored without difference: {error:?}"),
            }
        }
        (encoded, spent)
    }
}

impl EncodedChunk {
    /// True if it is stored with a bundle that is predicted from another one.
    pub(super) fn is_predicted(&self) -> bool {
        let whole = self.bundle.as_ref().and_then(|bundle| bundle.whole.as_ref());
        whole.is_some_and(|whole| whole.encoded.base.is_some())
    }

    pub(super) fn new(new: &NewChunk, form: StoredForm) -> Self {
        let NewChunk { chunk, file, base, .. } = new;
        let (start, numbers) = (chunk.start, chunk.number.is_some());
        Self { form, file: *file, start, numbers, base: *base, faster: false, bundle: None }
    }
}

impl StoredForm {
    /// Form of the chunk `id` of these plain bytes.
    pub(super) fn of(id: ChunkId, encoded: Encoded, plain: &[u8]) -> Self {
        let alone_len = if encoded.base.is_some() { alone_len(plain, &encoded) } else { 0 };
        Self { id, plain_len: u32::try_from(plain.len()).unwrap_or(u32::MAX), encoded, alone_len }
    }
}
