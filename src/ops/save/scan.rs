//! Finding the files to save, and the formats of checkpoints among them.

use std::path::Path;
use std::sync::Arc;

use super::detect::Formats;
use super::{RootLink, SaveOptions, SaveSource};
use crate::error::Result;
use crate::repository::Repository;
use crate::tree::{Rules, Walk, walk};
use crate::work::on_own_thread;

impl Repository {
    /// Lists the files to save.
    pub(super) async fn scan(&self, source: SaveSource, options: &SaveOptions) -> Result<(Arc<Walk>, Arc<Formats>)> {
        options.progress.phase("scanning", 0);
        let stop = options.stop.child_token();
        // A dropped save stops the thread, too.
        let _stops = stop.clone().drop_guard();
        let rules = Rules {
            excludes: options.exclude.clone(),
            skip: self.store().directory().map(Path::to_path_buf).into_iter().collect(),
            no_follow: options.root_link == RootLink::Refuse,
            no_ignore_files: options.no_ignore_files,
            memory: Some(self.budget().clone()),
            caller: options.caller.clone(),
            stop: stop.clone(),
        };
        let (cut, now) = (options.cut, self.clock().now());
        let memory = self.budget().tree_memory(options.caller.as_deref());
        let scan = move || {
            let walked = match source {
                SaveSource::Path(root) => walk(&root, &rules)?,
                SaveSource::Memory(files) => Walk::in_memory(files, now)?,
            };
            let formats = Formats::new(&walked, cut, memory, &stop);
            Ok((Arc::new(walked), Arc::new(formats)))
        };
        // It may take long, or hang with the file system: as many saves as there are threads for blocking work would stop all other.
        on_own_thread("scan", scan).await
    }
}
