//! An object store whose every request waits until the scheduler lets it through, and that knows the log's true history.

use std::fmt;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::channel::oneshot;
use futures::stream::{self, BoxStream};
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use towline::format::envelope::{Kind, open};
use towline::repository::layout::Numbered;
use towline::repository::log::{LogEntry, State};

/// The scheduler's decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is carried out and answered.
    Do,
    /// It is carried out; the answer is lost.
    Lost,
    /// It is not carried out; the answer says nothing.
    Fail,
    /// It is carried out later; the answer says nothing. Only for creates.
    Late,
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) who: usize,
    pub(crate) what: String,
    /// It is a create, the request whose answer must not be believed.
    pub(crate) creates: bool,
    pub(crate) verdict: oneshot::Sender<Verdict>,
}

/// True history of commits, and the state after each entry.
#[derive(Debug)]
pub(crate) struct Truth {
    pub(crate) entries: Vec<LogEntry>,
    pub(crate) states: Vec<State>,
    /// Entries under names that were cut away.
    pub(crate) strays: usize,
}

/// The store that all actors share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) store: InMemory,
    pub(crate) waiting: Mutex<Vec<Waiting>>,
    pub(crate) late: Mutex<Vec<(Path, PutPayload)>>,
    pub(crate) truth: Mutex<Truth>,
}

impl Shared {
    pub(crate) fn new() -> Arc<Self> {
        let truth = Truth { entries: vec![], states: vec![State::default()], strays: 0 };
        let (waiting, late) = (Mutex::default(), Mutex::default());
        Arc::new(Self { store: InMemory::new(), waiting, late, truth: Mutex::new(truth) })
    }

    /// Creates an object, and notes what that means for the log.
    pub(crate) async fn create(&self, key: &Path, payload: PutPayload) -> Result<PutResult> {
        let result = self.store.put_opts(key, payload.clone(), PutMode::Create.into()).await?;
        if let Some(number) = Numbered::Entry.number(key) {
            let body = open(Kind::Entry, &payload.into()).unwrap();
            self.note(usize::try_from(number).unwrap(), LogEntry::decode(&body).unwrap());
        }
        Ok(result)
    }

    fn note(&self, number: usize, entry: LogEntry) {
        let mut truth = self.truth.lock().unwrap();
        let len = truth.entries.len();
        assert!(number <= len + 1, "entry {number} leaves a hole in a log of {len}");
        if number <= len {
            truth.strays += 1;
            return;
        }
        let mut next = truth.states[len].clone();
        next.apply(&entry).expect("an entry is committed that may not follow");
        truth.states.push(next);
        truth.entries.push(entry);
    }
}

/// One actor's access to the store.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    pub(crate) shared: Arc<Shared>,
    pub(crate) who: usize,
}

impl Gate {
    async fn ask(&self, what: String, creates: bool) -> Verdict {
        let (verdict, answer) = oneshot::channel();
        self.shared.waiting.lock().unwrap().push(Waiting { who: self.who, what, creates, verdict });
        answer.await.expect("the scheduler answers every request of a living actor")
    }

    /// A request whose answer the scheduler may only delay, or lose together with the request.
    async fn pass(&self, what: String) -> Result<()> {
        match self.ask(what, false).await {
            Verdict::Do => Ok(()),
            _ => Err(no_answer()),
        }
    }
}

fn no_answer() -> object_store::Error {
    object_store::Error::Generic { store: "gate", source: "no answer".into() }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate({})", self.who)
    }
}

#[async_trait]
impl ObjectStore for Gate {
    async fn put_opts(&self, key: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        if opts.mode != PutMode::Create {
            self.pass(format!("put {key}")).await?;
            return self.shared.store.put_opts(key, payload, opts).await;
        }
        match self.ask(format!("create {key}"), true).await {
            Verdict::Do => self.shared.create(key, payload).await,
            Verdict::Lost => self.shared.create(key, payload).await.and(Err(no_answer())),
            Verdict::Fail => Err(no_answer()),
            Verdict::Late => {
                self.shared.late.lock().unwrap().push((key.clone(), payload));
                Err(no_answer())
            }
        }
    }

    async fn put_multipart_opts(&self, key: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.shared.store.put_multipart_opts(key, opts).await
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        self.pass(format!("get {key}")).await?;
        self.shared.store.get_opts(key, options).await
    }

    fn delete_stream(&self, keys: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let gate = self.clone();
        let delete = move |key: Result<Path>| {
            let gate = gate.clone();
            async move {
                let key = key?;
                gate.pass(format!("delete {key}")).await?;
                let one = stream::iter([Ok(key.clone())]).boxed();
                gate.shared.store.delete_stream(one).try_collect::<Vec<_>>().await?;
                Ok(key)
            }
        };
        keys.map(delete).buffered(4).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (gate, prefix) = (self.clone(), prefix.cloned());
        let listed = async move {
            gate.pass(format!("list {prefix:?}")).await?;
            Ok::<_, object_store::Error>(gate.shared.store.list(prefix.as_ref()))
        };
        listed.into_stream().try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.shared.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.shared.store.copy_opts(from, to, options).await
    }
}
