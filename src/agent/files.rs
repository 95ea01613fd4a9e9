//! Ranges of saved files, read in windows so that a slow client does not block others.

use std::iter::Peekable;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::time::Instant;

use super::file_windows::{FileWindows, WINDOW, Window};
use super::folders::Folder;
use super::open_trees::OpenTree;
use super::state::AgentState;
use super::tasks::resolve_for;
use super::tokens::Grant;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Content, EntryKind};
use crate::log_limit::LogLimit;
use crate::name::Name;
use crate::ops::RangeSink;
use crate::policy::LocalCaller;
use crate::repository::{Repository, Saved};
use crate::selector::Selector;

/// Maximum bytes that are sent at once, and so may still be sent after a change of the policy.
const PIECE: usize = 256 << 10;
/// Log lines about content that cannot be read.
static UNREADABLE: LogLimit = LogLimit::new();
/// Timeout for a client that reads nothing.
const PATIENCE: Duration = Duration::from_mins(1);
/// Time that the client of a tenant or token has for a window while others wait for one.
const WINDOW_TIME: Duration = Duration::from_mins(1);

/// An entry of a saved tree.
#[derive(Debug)]
pub(super) enum TreeNode {
    File(File),
    Folder(Folder),
}

/// Open file of a saved tree.
#[derive(Debug)]
pub(super) struct File {
    state: Arc<AgentState>,
    repository: Repository,
    saved: OpenTree,
    path: Vec<u8>,
}

impl TreeNode {
    /// Opens the file or folder at `path` of the tree that `selector` resolves to now; an empty path is the tree itself. For a
    /// token, `selector` resolves among the names that it may read.
    ///
    /// # Errors
    /// Not found, for the repository, the name or the path; usage, for a link.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn open(
        state: &Arc<AgentState>,
        repository: &Repository,
        grant: Option<&Arc<Grant>>,
        selector: &Selector,
        mut path: Vec<u8>,
    ) -> Result<Self> {
        let name = resolve_for(repository, grant, selector).await?;
        let saved = state.open_trees.open_for(repository, &name, grant.is_some()).await?;
        if path.last() == Some(&b'/') {
            path.pop();
        }
        let is_folder = saved.manifest.entry(&path).is_some_and(|entry| matches!(entry.kind, EntryKind::Folder));
        if path.is_empty() || is_folder {
            return Ok(Self::Folder(Folder { saved, path }));
        }
        let file = File { state: Arc::clone(state), repository: repository.clone(), saved, path };
        file.content()?;
        Ok(Self::File(file))
    }

    /// Name of the tree.
    pub(super) fn name(&self) -> &Name {
        match self {
            Self::File(file) => &file.saved.name,
            Self::Folder(folder) => &folder.saved.name,
        }
    }
}

impl File {
    fn content(&self) -> Result<&Content> {
        let place = || format!("{}:{}", self.saved.name, String::from_utf8_lossy(&self.path));
        match self.saved.manifest.entry(&self.path).map(|entry| &entry.kind) {
            Some(EntryKind::File(content)) => Ok(content),
            Some(_) => Err(Error::usage("this is a link, not a file").at(place()).help("read what it points to")),
            None => Err(Error::not_found("there is no such file in the saved tree")
                .at(place())
                .help(format!("`towline show {} --files` lists the paths", self.saved.name))),
        }
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> Result<u64> {
        self.content().map(|content| content.size)
    }

    /// Entity tag that changes when the tree does (<https://www.rfc-editor.org/rfc/rfc9110#section-8.8.3>).
    pub(super) fn tag(&self) -> String {
        format!("\"{}\"", self.saved.value.manifest)
    }

    /// Reads the bytes `range` in order. The stream ends early if they cannot be read, or if the client does not read them.
    /// Needs a runtime.
    pub(super) fn read(self, range: Range<u64>) -> Result<Receiver<Result<Bytes>>> {
        self.content()?;
        let (saved, path) = (Arc::clone(&self.saved), self.path.clone());
        let windows = Windows::new(range, move |from| {
            let places =
                content_at(&saved, &path).into_iter().flat_map(|content| content.placed(&saved.manifest.chunks));
            places.map(|(_, place)| place).skip_while(|place| place.end <= from).take(PLACES_AHEAD).collect()
        });
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(self.stream(windows, sender));
        Ok(receiver)
    }

    async fn stream(mut self, windows: impl Iterator<Item = Range<u64>>, readers: Sender<Result<Bytes>>) {
        for window in windows {
            let collected = tokio::select! {
                collected = self.read_window(window) => collected,
                () = readers.closed() => return,
            };
            let sent = match collected {
                Ok(buffer) => self.send(buffer.freeze(), &readers).await,
                Err(error) => Err(error),
            };
            match sent {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    if let Some(kept_back) = UNREADABLE.may() {
                        tracing::warn!(name = %self.saved.name, kept_back, "cannot read a file completely: {error:?}");
                    }
                    // A client that is gone is not an error.
                    let _ = readers.send_timeout(Err(error), PATIENCE).await;
                    return;
                }
            }
        }
    }

    /// Tenant or token that it is read for.
    fn limited(&self) -> Option<&str> {
        self.repository.caller().and_then(LocalCaller::limited)
    }

    /// Sends `window` piece by piece while the policy allows it. False if the client is gone, reads nothing, or is that of a tenant or
    /// token and too slow while others wait.
    async fn send(&self, window: Bytes, readers: &Sender<Result<Bytes>>) -> Result<bool> {
        let may_go_on = || self.repository.check_still_readable(&self.saved);
        let client = Client { readers, limit: self.limited().map(|_| WINDOW_TIME), windows: &self.state.windows };
        client.send(window, may_go_on, &self.state.file_bytes_sent).await
    }

    /// Reads the bytes `window`; reopens the tree once if its packs were replaced meanwhile.
    async fn read_window(&mut self, window: Range<u64>) -> Result<Window> {
        match self.attempt(&window).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let again = self.repository.saved(&self.saved.name).await?.shared();
                if again.value.manifest != self.saved.value.manifest || again.value == self.saved.value {
                    return Err(error);
                }
                self.saved = self.saved.renewed(again);
                self.attempt(&window).await
            }
            collected => collected,
        }
    }

    async fn attempt(&self, window: &Range<u64>) -> Result<Window> {
        let len = usize::try_from(window.end - window.start).unwrap_or(usize::MAX);
        let mut collected = self.state.windows.window(self.limited(), len).await?;
        // Holes are not delivered, so the buffer is zeroed first.
        collected.buffer.fill(0);
        let collected = Arc::new(Mutex::new(Some(collected)));
        let sink: RangeSink = {
            let collected = Arc::clone(&collected);
            Arc::new(move |_, at, bytes| {
                let mut collected = collected.lock().unwrap_or_else(PoisonError::into_inner);
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                let place = at..at.saturating_add(bytes.len());
                if let Some(place) = collected.as_mut().and_then(|window| window.buffer.get_mut(place)) {
                    place.copy_from_slice(bytes);
                }
                Ok(())
            })
        };
        self.repository.read_ranges(&self.saved, &[(self.path.clone(), window.clone())], sink).await?;
        let collected = collected.lock().unwrap_or_else(PoisonError::into_inner).take();
        collected.ok_or_else(|| Error::other("bytes of a file were lost"))
    }
}

/// Client to which a window is sent.
struct Client<'c> {
    readers: &'c Sender<Result<Bytes>>,
    /// Time for a window while others wait for one; none without a limit.
    limit: Option<Duration>,
    windows: &'c FileWindows,
}

impl Client<'_> {
    /// Sends `window` piece by piece, while `may_go_on`; counts the bytes in `sent`. False, if the client is gone, reads nothing, or is
    /// too slow.
    async fn send<F: Future<Output = Result<()>>>(
        &self,
        mut window: Bytes,
        may_go_on: impl Fn() -> F,
        sent: &AtomicU64,
    ) -> Result<bool> {
        let begun = Instant::now();
        while !window.is_empty() {
            if self.limit.is_some_and(|limit| begun.elapsed() > limit) && self.windows.is_wanted() {
                return Ok(false);
            }
            may_go_on().await?;
            let piece = window.split_to(PIECE.min(window.len()));
            let len = piece.len() as u64;
            if self.readers.send_timeout(Ok(piece), PATIENCE).await.is_err() {
                return Ok(false);
            }
            sent.fetch_add(len, Ordering::Relaxed);
        }
        Ok(true)
    }
}

/// Content of the file `path` of `saved`.
fn content_at<'s>(saved: &'s Saved, path: &[u8]) -> Option<&'s Content> {
    match &saved.manifest.entry(path)?.kind {
        EntryKind::File(content) => Some(content),
        _ => None,
    }
}

/// Windows of a range, as an iterator because a hole may be of any length. They end at chunk boundaries, so that no chunk is
/// fetched twice; holes are split anywhere.
struct Windows<P> {
    /// Lists some places of chunks from an offset on; none after the last.
    list: P,
    places: Peekable<std::vec::IntoIter<Range<u64>>>,
    /// False once the last places are listed.
    more: bool,
    rest: Range<u64>,
}

/// Places that are listed at a time: a large file has millions.
const PLACES_AHEAD: usize = 1 << 16;

impl<P: Fn(u64) -> Vec<Range<u64>>> Windows<P> {
    fn new(rest: Range<u64>, list: P) -> Self {
        Self { list, places: Vec::new().into_iter().peekable(), more: true, rest }
    }

    /// The next place that is not before `from`.
    fn place(&mut self, from: u64) -> Option<Range<u64>> {
        if self.more && self.places.peek().is_none() {
            let listed = (self.list)(from);
            self.more = !listed.is_empty();
            self.places = listed.into_iter().peekable();
        }
        self.places.peek().cloned()
    }
}

impl<P: Fn(u64) -> Vec<Range<u64>>> Iterator for Windows<P> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let from = self.rest.start;
        if from >= self.rest.end {
            return None;
        }
        let limit = self.rest.end.min(from.saturating_add(WINDOW));
        let mut to = from;
        while to < limit {
            match self.place(to) {
                Some(place) if place.start < limit && place.end > limit => {
                    // A chunk that is larger than a window is read whole.
                    to = if place.start > from { place.start } else { place.end.min(self.rest.end) };
                    break;
                }
                Some(place) if place.start < limit => {
                    to = place.end;
                    self.places.next();
                }
                _ => to = limit,
            }
        }
        self.rest.start = to;
        while self.places.next_if(|place| place.end <= to).is_some() {}
        Some(from..to)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;
    use crate::limits::MIB;

    /// A client of `limit` that reads each piece after a millisecond; whether it got all of `windows`' next window, and its bytes.
    async fn slow_client(windows: &FileWindows, limit: Option<Duration>) -> (bool, u64) {
        let (readers, mut pieces) = mpsc::channel::<Result<Bytes>>(1);
        let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
        let reading = async {
            while let Some(Ok(piece)) = pieces.recv().await {
                tokio::time::sleep(Duration::from_millis(1)).await;
                received.fetch_add(piece.len() as u64, Ordering::Relaxed);
            }
        };
        let sending = async {
            let window = windows.window(limit.map(|_| "slow"), usize::try_from(WINDOW).unwrap()).await.unwrap();
            let client = Client { readers: &readers, limit, windows };
            let whole = client.send(window.freeze(), || async { Ok(()) }, &sent).await.unwrap();
            drop(readers);
            whole
        };
        let (whole, ()) = tokio::join!(sending, reading);
        assert_eq!(sent.load(Ordering::Relaxed), received.load(Ordering::Relaxed));
        (whole, received.into_inner())
    }

    #[tokio::test]
    async fn a_slow_client_of_a_token_is_cut_off_only_while_others_wait() {
        let windows = FileWindows::new(64 * MIB).unwrap();
        let no_time = Some(Duration::ZERO);
        assert_eq!(slow_client(&windows, no_time).await, (true, WINDOW), "nobody waits");
        // Another token has used up its share, and waits for more of it.
        let len = usize::try_from(WINDOW).unwrap();
        let mut held = Vec::new();
        let waiting = loop {
            let mut next = Box::pin(windows.window(Some("other"), len));
            match futures::poll!(&mut next) {
                Poll::Ready(window) => held.push(window.unwrap()),
                Poll::Pending => break next,
            }
        };
        assert!(windows.is_wanted());
        let (whole, received) = slow_client(&windows, no_time).await;
        assert!(!whole && received < WINDOW, "{received}");
        assert_eq!(slow_client(&windows, Some(WINDOW_TIME)).await, (true, WINDOW), "it has a minute");
        assert_eq!(slow_client(&windows, None).await, (true, WINDOW), "a user has no limit");
        drop((waiting, held));
    }

    fn cut(places: &[Range<u64>], range: Range<u64>) -> Vec<Range<u64>> {
        let in_mib = |range: &Range<u64>| range.start * MIB..range.end * MIB;
        // Two places at a time: what comes later is listed later.
        let list = |from| places.iter().map(in_mib).skip_while(|place| place.end <= from).take(2).collect();
        let cut = Windows::new(in_mib(&range), list);
        cut.map(|window| window.start / MIB..window.end / MIB).collect()
    }

    #[test]
    fn windows_end_where_chunks_do() {
        assert_eq!(cut(&[0..3, 3..6, 6..9, 9..12], 0..12), [0..6, 6..12]);
        assert_eq!(cut(&[0..3, 3..6, 6..9, 9..12], 1..10), [1..9, 9..10]);
        assert_eq!(cut(&[0..4, 4..8, 8..12], 0..12), [0..8, 8..12]);
        assert_eq!(cut(&[0..12, 12..13], 0..13), [0..12, 12..13], "larger than a window");
        assert_eq!(cut(&[0..12, 12..13], 1..11).len(), 1);
    }

    #[test]
    fn holes_are_cut_anywhere() {
        assert_eq!(cut(&[], 0..20), [0..8, 8..16, 16..20]);
        assert_eq!(cut(&[0..1, 19..20], 0..20), [0..8, 8..16, 16..20]);
        assert_eq!(cut(&[], 0..0), []);
        let end = Windows::new(u64::MAX - 5..u64::MAX, |_| Vec::new());
        assert!(end.eq(std::iter::once(u64::MAX - 5..u64::MAX)), "of a file of any length");
    }
}
