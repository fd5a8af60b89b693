//! Messages to a thread that may end at any time. No message stays in the queue of a thread that
//! has ended, so that a caller that waits for an answer sees the end of the thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use crossbeam_channel::{Receiver, Sender, unbounded};

/// A message that was not delivered.
#[derive(Debug)]
pub enum Undelivered<T> {
    /// There is no room now.
    Full(T),
    /// The thread has ended. The message has been dropped.
    Gone,
}

/// Where messages are sent to. Clones send to the same thread.
#[derive(Debug)]
pub struct Mailbox<T> {
    send: Sender<T>,
    /// A message that arrives after the thread's last look is removed by its sender: a channel
    /// keeps messages for as long as it has a sender.
    rest: Receiver<T>,
    ended: Arc<AtomicBool>,
    /// Messages that wait or are being sent. The channel itself has no limit, so that it takes
    /// memory for those alone.
    count: Arc<AtomicUsize>,
    room: usize,
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        let (ended, count) = (Arc::clone(&self.ended), Arc::clone(&self.count));
        Self { send: self.send.clone(), rest: self.rest.clone(), ended, count, room: self.room }
    }
}

impl<T> Mailbox<T> {
    /// Leaves a message. The thread has to be woken to look at it.
    pub fn send(&self, message: T) -> Result<(), Undelivered<T>> {
        if self.count.fetch_add(1, Ordering::AcqRel) >= self.room {
            self.count.fetch_sub(1, Ordering::AcqRel);
            return Err(Undelivered::Full(message));
        }
        if self.send.send(message).is_err() {
            return Err(Undelivered::Gone);
        }
        // Pairs with the fence in the inbox's drop: either that finds the message, or this sees
        // that it has looked.
        fence(Ordering::SeqCst);
        if self.ended.load(Ordering::Relaxed) {
            while self.rest.try_recv().is_ok() {}
            return Err(Undelivered::Gone);
        }
        Ok(())
    }
}

/// Where the thread finds its messages.
#[derive(Debug)]
pub struct Inbox<T> {
    receive: Receiver<T>,
    ended: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
}

impl<T> Inbox<T> {
    /// The next message, if there is one.
    #[must_use]
    pub fn take(&self) -> Option<T> {
        let message = self.receive.try_recv().ok()?;
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(message)
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while self.receive.try_recv().is_ok() {}
    }
}

/// A mailbox with room for this many messages, and its inbox.
#[must_use]
pub fn mailbox<T>(room: usize) -> (Mailbox<T>, Inbox<T>) {
    let (send, receive) = unbounded();
    let (ended, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let inbox =
        Inbox { receive: receive.clone(), ended: Arc::clone(&ended), count: Arc::clone(&count) };
    (Mailbox { send, rest: receive, ended, count, room }, inbox)
}

#[cfg(test)]
mod tests {
    use futures_channel::oneshot;

    use super::*;

    #[test]
    fn messages_are_taken_in_order_and_room_is_limited() {
        let (mail, inbox) = mailbox(2);
        mail.send(1).unwrap();
        mail.clone().send(2).unwrap();
        assert!(matches!(mail.send(3), Err(Undelivered::Full(3))));
        assert_eq!(inbox.take(), Some(1));
        mail.send(3).unwrap();
        assert!(matches!(mail.send(4), Err(Undelivered::Full(4))));
        assert_eq!((inbox.take(), inbox.take(), inbox.take()), (Some(2), Some(3), None));
    }

    #[test]
    fn a_waiter_sees_the_end_whenever_it_comes() {
        for round in 0..20_000 {
            let (mail, inbox) = mailbox(4);
            let thread = std::thread::spawn(move || {
                for _ in 0..round % 64 {
                    std::hint::spin_loop();
                }
                drop(inbox);
            });
            let (answer, receive) = oneshot::channel::<()>();
            let sent = mail.send(answer);
            assert!(!matches!(sent, Err(Undelivered::Full(_))));
            thread.join().unwrap();
            // The mailbox lives on: it must not keep the message alive.
            let mut receive = receive;
            assert_eq!(receive.try_recv(), Err(oneshot::Canceled));
        }
    }
}
