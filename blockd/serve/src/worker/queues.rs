//! The queues of block devices that a worker serves.

use std::sync::Arc;

use blockd_engine::block::Completion;
use blockd_engine::volume::{Executor, Step, VolumeRef};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::balance::Load;
use crate::demands::Demands;
use crate::ublk::{Queue, QueueSpec};
use crate::{Context, FrontendError};

type Started = oneshot::Sender<Result<(), FrontendError>>;

/// All queues of a worker, by their place.
#[derive(Debug, Default)]
pub(super) struct Queues {
    all: Vec<Option<Queue>>,
    /// Queues whose commands the kernel does not have yet, with the waiting callers.
    starting: Vec<(usize, Started)>,
    /// Queues that may have ended.
    ended: Vec<usize>,
    /// Pools that queues on standby wait for.
    demands: Arc<Demands>,
}

impl Queues {
    pub(super) fn new(demands: Arc<Demands>) -> Self {
        Self { demands, ..Self::default() }
    }

    /// Takes a queue over. The answer comes after the next turn, when the kernel has its commands.
    pub(super) fn start(
        &mut self,
        spec: QueueSpec,
        volume: Option<VolumeRef>,
        answer: Started,
        (shown, load): (&Mutex<Vec<u32>>, &Load),
        context: &mut Context<'_>,
    ) {
        let device = spec.device;
        let at = self.all.iter().position(Option::is_none).unwrap_or(self.all.len());
        let is_mapped = volume.is_some_and(|volume| context.executor.is_mapped(volume));
        let started = if spec.zero_copy && is_mapped {
            Err(std::io::Error::other("a pool in memory can't do without copies"))
        } else {
            Queue::start(spec, at, volume, Arc::clone(&self.demands), context)
        };
        match started {
            Ok(queue) => {
                if at == self.all.len() {
                    self.all.push(None);
                }
                self.all[at] = Some(queue);
                self.starting.push((at, answer));
            }
            Err(source) => {
                volume.into_iter().for_each(|volume| context.executor.detach(volume));
                forget(shown, device);
                load.end();
                let _ = answer.send(Err(FrontendError::Io { what: "serve a queue", source }));
            }
        }
    }

    fn get(&mut self, at: usize) -> Option<&mut Queue> {
        self.all.get_mut(at).and_then(Option::as_mut)
    }

    /// A command of a request has ended.
    pub(super) fn ended(
        &mut self,
        (at, tag, step): (usize, u16, Step),
        result: i32,
        context: &mut Context<'_>,
    ) {
        let Some(queue) = self.all.get_mut(at).and_then(Option::as_mut) else {
            tracing::error!(at, "a command has ended that belongs to no queue");
            return;
        };
        queue.ended(tag, step, result, context);
        if queue.has_ended() {
            self.ended.push(at);
        }
    }

    /// A request has been carried out.
    pub(super) fn answered(
        &mut self,
        (at, tag): (usize, u16),
        completion: Completion,
        context: &mut Context<'_>,
    ) {
        if let Some(queue) = self.get(at) {
            queue.answered(tag, completion, context);
        }
    }

    /// Goes on with a queue that was held back.
    pub(super) fn resume(&mut self, at: usize, context: &mut Context<'_>) {
        if let Some(queue) = self.get(at) {
            queue.resume(context);
        }
    }

    /// Whether a caller waits for the kernel to have a queue's commands.
    pub(super) const fn is_starting(&self) -> bool {
        !self.starting.is_empty()
    }

    /// Handles the end of a turn: by then the kernel has accepted or rejected the submitted
    /// commands.
    pub(super) fn after_turn(
        &mut self,
        (shown, load): (&Mutex<Vec<u32>>, &Load),
        context: &mut Context<'_>,
    ) {
        for (at, answer) in self.starting.drain(..) {
            let refused = self.all[at].as_ref().and_then(Queue::refused);
            let result = refused.map_or(Ok(()), |number| {
                let source = std::io::Error::from_raw_os_error(number.saturating_neg());
                Err(FrontendError::Io { what: "fetch a queue's requests", source })
            });
            let _ = answer.send(result);
        }
        while let Some(at) = self.ended.pop() {
            let Some(queue) = self.all[at].take_if(|queue| queue.has_ended()) else { continue };
            let device = queue.spec.device;
            queue.release(context);
            load.end();
            forget(shown, device);
        }
    }

    /// Fails what waits for the pool or for space in the queues of a device.
    pub(super) fn fail_waiting(&mut self, device: u32, context: &mut Context<'_>) {
        for queue in self.all.iter_mut().flatten().filter(|queue| queue.spec.device == device) {
            queue.fail_waiting(context);
            if let Some(volume) = queue.volume() {
                context.executor.cancel_parked(volume);
            }
        }
    }

    /// Has the requests of a device wait that failed while it was started.
    pub(super) fn let_wait(&mut self, device: u32) {
        let all = self.all.iter_mut().flatten();
        all.filter(|queue| queue.spec.device == device).for_each(Queue::let_wait);
    }

    fn of_pool(&mut self, pool: [u8; 16]) -> impl Iterator<Item = &mut Queue> {
        self.all.iter_mut().flatten().filter(move |queue| queue.spec.pool == pool)
    }

    /// Has the requests to a pool's volumes wait from now on.
    pub(super) fn stand_by(&mut self, pool: [u8; 16]) {
        self.of_pool(pool).for_each(Queue::stand_by);
    }

    /// Lets go of a pool's volumes that no request is with. True when none is left.
    pub(super) fn rest(&mut self, pool: [u8; 16], context: &mut Context<'_>) -> bool {
        let mut all = true;
        for queue in self.of_pool(pool) {
            all &= queue.rest(context);
        }
        all
    }

    /// Answers flushes of a pool's volumes from now on.
    pub(super) fn answer_flushes(&mut self, pool: [u8; 16], context: &mut Context<'_>) {
        self.of_pool(pool).for_each(|queue| queue.answer_flushes(context));
    }

    /// Answers no flush of a pool's volumes on standby any more.
    pub(super) fn hold_flushes(&mut self, pool: [u8; 16]) {
        self.of_pool(pool).for_each(Queue::hold_flushes);
    }

    /// Serves a pool's volumes again. `attach` gives the volume of a queue.
    pub(super) fn serve(
        &mut self,
        pool: [u8; 16],
        context: &mut Context<'_>,
        attach: impl Fn(&QueueSpec, &mut Executor) -> Option<VolumeRef>,
    ) {
        for queue in self.of_pool(pool) {
            let volume = match queue.volume() {
                Some(_) => None,
                None => match attach(&queue.spec, context.executor) {
                    Some(volume) => Some(volume),
                    None => {
                        let (device, volume) = (queue.spec.device, &queue.spec.name);
                        tracing::warn!(device, volume, "its volume is gone: requests fail");
                        queue.fail_until_served(context);
                        continue;
                    }
                },
            };
            if !queue.serve(volume, context) {
                queue.fail_until_served(context);
            }
        }
    }

    /// Requests that come from now on are left to the next process, and so are those that wait.
    pub(super) fn drain(&mut self, executor: &mut Executor) {
        for queue in self.all.iter_mut().flatten() {
            queue.drain();
            if let Some(volume) = queue.volume() {
                executor.cancel_parked(volume);
            }
        }
    }

    /// Whether the kernel has commands of a queue.
    pub(super) fn any(&self) -> bool {
        self.all.iter().any(Option::is_some)
    }

    /// How many queues have requests that are being served.
    pub(super) fn busy(&self) -> usize {
        self.all.iter().flatten().filter(|queue| !queue.is_idle()).count()
    }

    /// The volumes of the queues are served no more.
    pub(super) fn leave(&mut self, executor: &mut Executor) {
        let idle = self.all.iter().flatten().filter(|queue| queue.is_idle());
        for volume in idle.filter_map(Queue::volume) {
            executor.detach(volume);
        }
    }
}

fn forget(shown: &Mutex<Vec<u32>>, device: u32) {
    let mut shown = shown.lock();
    if let Some(at) = shown.iter().position(|&other| other == device) {
        shown.swap_remove(at);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::path::PathBuf;

    use blockd_engine::backing::{Ring, RingOptions};
    use blockd_engine::pool::{Control, Outcome, PoolHandle, VolumeId, open};
    use blockd_media::clock::Clock;
    use blockd_media::pool::PoolSpec;
    use blockd_media::{DeviceKind, DeviceSpec};

    use super::*;
    use crate::ublk::QueueStandby;

    /// The requests of the queue, by their tags.
    const FLUSH: u16 = 0;
    const READ: u16 = 1;

    /// A file in place of `/dev/ublkcN`, with the descriptors of both requests.
    fn descriptors() -> Arc<File> {
        let path = std::env::temp_dir().join(format!("blockd-queues-{}", std::process::id()));
        let mut options = File::options();
        let mut file = options.read(true).write(true).create_new(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let mut page = [0; 4096];
        // The operation of the first one; that of the second is 0.
        page[0] = 2;
        file.write_all(&page).unwrap();
        Arc::new(file)
    }

    /// A pool in memory with a volume.
    fn pool() -> (PoolHandle, VolumeId) {
        let (kind, size) = (DeviceKind::Memory, Some(64 << 20));
        let device =
            DeviceSpec { path: PathBuf::new(), kind, size, preallocate: false, direct: false };
        let (pool, _) = open(&PoolSpec::new("queues", device, PathBuf::from("/dev/shm"))).unwrap();
        let control = Control::Create { name: "v".to_owned(), size: 1 << 20, block_size: 512 };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let Ok(Outcome::Created(volume)) = runtime.block_on(pool.control(control)) else {
            panic!("no volume");
        };
        (pool, volume)
    }

    #[test]
    fn requests_that_wait_for_a_close_fail_with_it_and_wait_again_after_the_next_one() {
        for is_opened_between in [false, true] {
            wait_again_after_a_failed_close(is_opened_between);
        }
    }

    /// `is_opened_between`: an opening was begun, and failed on another worker.
    fn wait_again_after_a_failed_close(is_opened_between: bool) {
        let (pool, volume) = pool();
        let options = RingOptions { operations: 4096, arena_bytes: 4 << 20, serves: true };
        let mut ring = Ring::new(options).unwrap();
        let mut executor = Executor::new(0, ring.free_bytes(), Clock::start());
        executor.add_pool(&pool, &mut ring).unwrap();
        let served = executor.attach(pool.id(), volume, Arc::default).unwrap();
        let mut context = Context { ring: &mut ring, executor: &mut executor };
        let spec = QueueSpec {
            device: 0,
            queue: 0,
            depth: 2,
            max_bytes: 4096,
            zero_copy: false,
            device_file: descriptors(),
            pool: pool.id(),
            volume,
            name: "v".to_owned(),
            read_only: false,
            standby: QueueStandby::No,
        };
        let mut queues = Queues::default();
        let (shown, load) = (Mutex::default(), Load::default());
        let (answer, mut started) = oneshot::channel();
        load.place();
        queues.start(spec, Some(served), answer, (&shown, &load), &mut context);
        assert!(queues.any(), "{:?}", started.try_recv());
        queues.stand_by(pool.id());
        assert!(queues.rest(pool.id(), &mut context));
        queues.ended((0, FLUSH, Step::Fetch), 0, &mut context);
        assert_eq!(queues.busy(), 1, "a flush is answered before the close");
        // The close fails: the pool is gone, and was not flushed.
        assert!(context.executor.remove_pool(pool.id(), context.ring));
        queues.serve(pool.id(), &mut context, |spec, executor| {
            executor.attach(spec.pool, spec.volume, Arc::default).ok()
        });
        assert_eq!(queues.busy(), 0, "a flush waits for the next opening");
        queues.ended((0, READ, Step::Fetch), 0, &mut context);
        assert_eq!(queues.busy(), 0, "a read waits for a pool that is not served");
        if is_opened_between {
            queues.hold_flushes(pool.id());
        }
        // It was closed in order after all.
        queues.answer_flushes(pool.id(), &mut context);
        queues.ended((0, READ, Step::Fetch), 0, &mut context);
        assert_eq!(queues.busy(), 1, "a read on standby fails");
        // The device is about to be removed, which no opening and no hand-over changes.
        queues.fail_waiting(0, &mut context);
        queues.serve(pool.id(), &mut context, |_, _| None);
        queues.answer_flushes(pool.id(), &mut context);
        queues.ended((0, READ, Step::Fetch), 0, &mut context);
        assert_eq!(queues.busy(), 0, "a read keeps a device from being removed");
    }
}
