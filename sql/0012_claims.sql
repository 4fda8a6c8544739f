-- Claiming goes on from where it has got to. What has gone through the queue stays in its index until it is vacuumed, which an
-- old snapshot (a dump, a long report) puts off by hours; a claim that starts at the head of the queue steps over all of it:
-- 0.4 us a job, every time. So claims start at the clock, what comes back to the queue comes back there, and only now and
-- then does one start at the head, in case something was left behind. Looking for claims that have lapsed works likewise.

-- How far claiming has got: among first attempts waybill.queue_clock says so, among retries `retry`, the lowest priority that was
-- claimed. And how far it had got 3 to 6 seconds ago (`old_…`), which is where claims start: no transaction that places jobs by
-- what it has read lasts longer. A table of its own, since adding columns to waybill.queue_clock would wait for a dump that is
-- running, and claims would wait for that.
create table waybill.claim_marks (
  retry int not null,
  since timestamptz not null,
  old_tag float8 not null,
  old_retry int not null,
  next_tag float8 not null,
  next_retry int not null
) with (fillfactor = 50);
insert into waybill.claim_marks values (-1400000000, '-infinity', 0, -1400000000, 0, -1400000000);
