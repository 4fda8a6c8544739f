-- The oldest are told first, whosesoever they are; by the primary key that took a look at all of them.
create index announcements_oldest on waybill.announcements (announcement_id);
